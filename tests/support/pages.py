"""What README and docs tell people to type."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

BUILD = r"-w /work nvcr\S+ \./gen_vllm_env\.sh$"
SERVE = r"tritonserver --model-store=/models"
BUILD_WITH_CACHE = r"VLLM_ENV_CACHE=/cache.*\./gen_vllm_env\.sh$"
PORT = r"-p 9000:9000"
FILL = r"sh wheelhouse \$DIR "
BUILD_OFFLINE = r"--offline --wheelhouse \$DIR "
IN_CONTAINERS = (BUILD, SERVE, BUILD_WITH_CACHE, FILL, BUILD_OFFLINE)
"""Patterns of the lines that tests/e2e/test_container.py runs; each is on one of `TYPED_PAGES`."""
TYPED_PAGES = ("README.md", "docs/README.md", "docs/laptop.md", "docs/docker.md")
"""The pages with commands that tests run."""
TYPED = {
    "git clone $REPOSITORY vllm-env && cd vllm-env": "test_container.py",
    "mkdir -p $HOME/.cache/vllm_env": "test_container.py",
    "./gen_vllm_env.sh": "test_published.py",
    ".triton/bin/tritonserver --model-store=model_repository": "test_published.py",
    "python3 client/client.py --iterations 10": "test_published.py",
    "python3 client/client.py --iterations 10 --streaming-mode": "test_client.py",
}
"""The other commands of these pages, and the test in tests/e2e that types the same for folders and ports of its own."""


PASTED_PAGES = (
    "docs/chat.md", "docs/client.md", "docs/command_line.md", "docs/faq.md", "docs/first_start.md", "docs/kubernetes.md",
    "docs/laptop.md", "docs/layouts.md", "docs/lora.md", "docs/moving.md", "docs/openai.md", "docs/requests.md",
    "docs/scaling.md", "docs/serving.md", "docs/tensors.md", "docs/troubleshooting.md", "docs/versions.md", "docs/why.md",
)  # fmt: skip
"""The pages with blocks that tests/e2e/test_pasted.py pastes."""


@dataclass(frozen=True)
class Block:
    """A block of code on a page.

    Attributes:
        language: what follows the fence.
        text: the lines.
        reason: why no test runs it, by the page; or how it is run.
        pasted: whether tests/e2e/test_pasted.py pastes it.
    """

    language: str
    text: str
    reason: str
    pasted: bool

    @property
    def commands(self) -> list[str]:
        """The commands, each on one line, without comments and the lines that only set a variable."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [" ".join(line.split()) for line in lines if not re.match(r"#|[A-Z]+=\S+(\s+#|$)", line)]


def blocks_in(page: Path) -> list[Block]:
    """Return the blocks of code of a page; a comment `not run` or `pasted` directly before one has the reason."""
    comment = r"(?:<!-- (not run|pasted): ([^\n]+) -->\n)?"
    found = re.findall(rf"^{comment}```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [Block(language, text, reason, kind == "pasted") for kind, reason, language, text in found]


def typed_in(text: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a block, each with the lines that comments below it show.

    A command may go over several lines, by a backslash or as a text up to `END`. A comment with `(` at its begin shows nothing.
    """
    found: list[tuple[str, list[str]]] = []
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("#"):
            shown = line[1:].strip()
            if found and not shown.startswith(("…", "from another", "start the server", "(")):
                found[-1][1].append(shown)
            continue
        command = line
        while command.endswith("\\") or command.count("'") % 2:
            command += f"\n{next(lines)}"
        if "<<" in line:
            while not command.endswith("\nEND"):
                command += f"\n{next(lines)}"
        # What stands behind a command is not part of it.
        found.append((re.sub(r"(?<=\S)\s{2,}#\s.*", "", command), []))
    return found


def requests_in(page: Path, test: str = "") -> list[tuple[str, str]]:
    """Return the path and the body of each `curl` line of a page, as a shell would take them.

    Those of the blocks that are run, and of those whose reason names `test`.

    Raises:
        AssertionError: One goes to another server than a local Triton.
    """

    def is_meant(block: Block) -> bool:
        return not block.reason or bool(test and test in block.reason)

    found = []
    for line in (command for block in blocks_in(page) if is_meant(block) for command in block.commands):
        if line.startswith("curl "):
            words = shlex.split(line)
            host, _, path = next(word for word in words if "/v2/" in word).partition("/")
            assert host == "localhost:8000", line
            found.append((f"/{path}", words[words.index("-d") + 1]))
    return found
