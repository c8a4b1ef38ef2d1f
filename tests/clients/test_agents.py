"""Two coding agents write a file and run a command, streamed; from our port as from vLLM's own server."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from clients import standin
from clients.lane import ALONE, RUN_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from clients.lane import Clients, Lane

pytestmark = pytest.mark.e2e
TASK = "Write a greeting into a file, and shout it."
CLAUDE = {
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_MODEL": "vllm",
    "ANTHROPIC_SMALL_FAST_MODEL": "vllm",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "IS_SANDBOX": "1",  # it refuses root otherwise
}
CODEX = """\
model = "vllm"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "{url}/v1"
wire_api = "responses"
"""


def claude(clients: Clients, url: str, home: Path) -> str:
    """Let Claude Code do the task; return its events."""
    program = clients.agent("@anthropic-ai/claude-code", "claude")
    argv = [program, "-p", TASK, "--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose"]
    return run(argv, home, {**CLAUDE, "ANTHROPIC_BASE_URL": url})


def codex(clients: Clients, url: str, home: Path) -> str:
    """Let Codex CLI do the task; return its events."""
    program = clients.agent("@openai/codex", "codex")
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(CODEX.format(url=url), encoding="utf-8")
    return run([program, "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK], home, {})


def run(argv: list[str | Path], home: Path, variables: dict[str, str]) -> str:
    """Run an agent in an empty project; return what it prints."""
    project = home / "project"
    project.mkdir()
    done = subprocess.run(
        argv,
        cwd=project,
        env={**ALONE, **variables, "HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("server", ["ours", "theirs"])
@pytest.mark.parametrize("agent", [claude, codex])
def test_an_agent_writes_a_file_and_runs_a_command(agent, clients: Clients, lane: Lane, server: str, tmp_path: Path) -> None:
    """The agent gets three answers: two with a tool call, whose results it sends, and the last."""
    said = agent(clients, getattr(lane, server), tmp_path)
    files = {file.name: file.read_text("utf-8") for file in (tmp_path / "project").iterdir()}
    assert files == {standin.GREETING: standin.TEXT, standin.SHOUTED: standin.TEXT.upper()}
    events = [json.loads(line) for line in said.splitlines()]
    assert standin.TEXT.upper().strip() in said  # the command's output, as the agent read it
    assert standin.DONE in json.dumps(events[-2:])
