"""The command line: exit codes, messages and what is printed; nothing long is begun here."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.patience import LIMIT, pause
from support.repositories import CHECKOUT
from vllm_env.base.errors import CommandError
from vllm_env.base.workspace import TEMPLATE
from vllm_env.build import BuildResult
from vllm_env.cli.main import main
from vllm_env.prefix.prefix import BUILD_SPACE, EXTRACTED_SPACE
from vllm_env.triton.root import is_plain

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.long


def _run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vllm", "0.32.0", "--vllm-commit", "a" * 40], "Argument --vllm-commit: not allowed with argument --vllm."),
        (["--profile", "tpu"], "tpu"),
        (["--smoke-run", "--no-smoke-run"], "Argument --no-smoke-run: not allowed with argument --smoke-run."),
        (
            ["--triton-release", "26.07", "--triton-root", "/t"],
            "Argument --triton-root: not allowed with argument --triton-release.",
        ),
        (["--jobs", "-3"], "'-3' is not a number of 0 or more"),
        (["--wheelhouse", "/nonexistent"], "--wheelhouse /nonexistent is not a folder"),
        (["--model", "a/b"], "'a/b' is not a model's name"),
        (["--model", "facebook/opt-125m"], '"model": "facebook/opt-125m" in model_repository/vllm/vllm_engine_args.json'),
        (["inspect", "--model", "facebook/opt-125m"], '"model": "facebook/opt-125m"'),
        (["--model", f"{TEMPLATE}"], f"--model-repository {TEMPLATE.parent} --model vllm"),
        (["--no-smoke-run", "--smoke-model", "x"], "--smoke-model has no effect with --no-smoke-run"),
        (["--stub", "prebuilt", "--triton-git-url", "https://g"], "--triton-git-url has no effect with --stub prebuilt"),
        (["--vllm", "", "--dry-run"], "The value of --vllm is empty"),
        (["adopt"], "SOURCE"),
        (["adopt", "/nonexistent", "--dry-run"], "/nonexistent is not a folder"),
        (["adopt", "/nonexistent", "--model", "a/b"], "'a/b' is not a model's name"),
        (["adopt", "/"], "'' is not a model's name"),
        (["adopt", "/nonexistent", "--count", "2"], "--count: an adopted model keeps its instances"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The message names the option and what to do; nothing is begun and nothing goes to stdout."""
    assert _run(*arguments) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert err.startswith("error: ")
    assert "  fix: " in err
    assert out == ""
    assert not (tmp_path / "cache").exists()


def test_a_pin_without_a_lock_is_told_how_to_get_one(locked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With --locked. The lock that was looked for is in a folder that goes with the dry run, so it is not named."""
    assert _run(*locked, "--profile", "cpu", "--vllm", "0.98.0") == 1
    said = capsys.readouterr().err
    assert "--save FILE" in said
    assert "--spec FILE --locked" in said
    assert "dry-run-" not in said


def test_a_folder_that_cannot_be_made_is_refused_first(locked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Root may write into /proc, says access(2), and nothing can be created there."""
    assert _run(*locked, "--profile", "cpu", "--model-repository", "/proc/foo") == 1
    assert "--model-repository /proc/foo cannot be written" in capsys.readouterr().err
    assert _run("wheelhouse", "/proc/foo", *locked, "--profile", "cpu") == 1
    assert "/proc/foo cannot be written" in capsys.readouterr().err
    options = [option for option in locked if option != "--locked"]
    assert _run(*options, "--profile", "cpu", "--save", "/proc/foo/x.toml") == 1
    assert "--save /proc/foo/x.toml cannot be written" in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_done(locked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As lines for a user, and as JSON for a program; nothing is made."""
    options = [*locked, "--profile", "cpu", "--layout", "archive", "--no-smoke-run", "--warm"]
    assert _run(*options) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert _run(*options, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    costs = {name: facts.pop(name) for name in ("bytes_to_fetch", "wheels_of_unknown_size", "bytes_needed")}
    lines = {name: shown.pop(name) for name in ("fetch", "space")}
    assert shown == {name: str(value) for name, value in facts.items()}
    cache = str(tmp_path / "cache")
    assert costs["bytes_to_fetch"] == 55_000_000
    assert costs["bytes_needed"] == {cache: BUILD_SPACE["cpu"], "/tmp": EXTRACTED_SPACE["cpu"]}
    assert lines["fetch"] == "55 MB of wheels, and 1 wheels of unknown size"
    assert lines["space"] == f"6.0 GB in {cache}, 2.5 GB in /tmp"
    assert facts["profile"] == "cpu"
    assert facts["vllm"] == "vllm==0.99.0"
    assert facts["python"].startswith("3.11.")
    assert facts["pin"] == "--vllm 0.99.0"
    assert (facts["wheels"], facts["conda_channel"]) == (2, "local")
    assert facts["layout"] == "archive"
    assert facts["triton"] == f"24.10 in {tmp_path / 'triton'}"
    assert facts["stub"].startswith("prebuilt, ")
    assert f"load {tmp_path / 'models' / 'vllm'} once" in facts["warm"]
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("option", [["--jobs", "3"], ["--boost-url", "https://b"], ["--triton-git-url", "https://g"], []])
def test_options_of_a_compiler_that_does_not_run_are_noted(
    locked: list[str], option: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stub is Triton's own. A mirror in the environment is for all builds, so nothing is said of it."""
    monkeypatch.setenv("TRITON_GIT_URL", "https://mirror")
    assert _run(*locked, "--profile", "cpu", *option) == 0
    assert ("have no effect: no stub is compiled" in capsys.readouterr().err) is bool(option)


def test_a_build_ends_with_its_answers_and_what_comes_next(
    built: BuildResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompt and answer, the client's last line, what is where, and the commands to serve it and to ask it."""
    monkeypatch.setattr("vllm_env.cli.next_steps.TOOLS", tmp_path / "tools")  # an installed wheel has this interpreter only
    assert _run("--model-repository", tmp_path / "models") == 0
    assert capsys.readouterr().out.splitlines() == [
        "'Hello' -> ' there'",
        "PASS: vLLM example",
        f"{built.model}: built, vLLM 0.32.0 for Triton 24.10",
        f"{built.model}/vllm_cache: 3 files, 2 MB",
        "Next:",
        f"  {tmp_path}/triton/bin/tritonserver --model-store={tmp_path}/models",
        f"  {shlex.quote(sys.executable)} client/client.py --iterations 10",
    ]


def test_a_build_without_a_gpu_ends_with_why_it_was_not_served(
    built: BuildResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a success, and the model is for another machine; a program reads the reason, too."""
    unserved = dataclasses.replace(built, smoke=None, warmed=None, unserved="no GPU")
    monkeypatch.setattr("vllm_env.cli.main.build", lambda *_, **__: unserved)
    assert _run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{built.model}: built, vLLM 0.32.0 for Triton 24.10"
    assert lines[-1] == "not served here: no GPU"
    assert _run("--json") == 0
    assert json.loads(capsys.readouterr().out)["not_served"] == "no GPU"


@pytest.mark.usefixtures("built")
def test_what_to_type_next_works_where_it_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In another folder, with spaces in names, for another model; any python3 finds the tools of its checkout."""
    place = tmp_path / "my work"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setattr("vllm_env.cli.next_steps.TOOLS", CHECKOUT / ".tools/venv-3.11-0123abcd/bin")
    assert _run("--model-repository", "the models", "--model", "my model") == 0
    link, serve, ask = capsys.readouterr().out.splitlines()[-3:]
    command, option, repository, name = shlex.split(link)
    assert (command, option, repository) == ("ln", "-sfn", f"{place}/the models")
    assert shlex.split(serve) == [f"{tmp_path}/triton/bin/tritonserver", f"--model-store={name}"]
    assert is_plain(name)
    client, prompts = f"{CHECKOUT}/client/client.py", f"{CHECKOUT}/prompts.txt"
    words = ["python3", client, "--iterations", "10", "--model", "my model", "--input-prompts", prompts]
    assert shlex.split(ask) == words


def test_an_installed_wheel_names_itself(
    built: BuildResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it is typed: by its name where the shell finds it, else by its path; with what differs from the defaults."""
    program = tmp_path / "venv/bin/vllm-env"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(program)])
    monkeypatch.setattr("vllm_env.cli.next_steps.IS_WHEEL", True)
    monkeypatch.setattr("vllm_env.cli.next_steps.COMMAND", "vllm-env")
    monkeypatch.setattr("vllm_env.cli.next_steps.installed_triton", lambda: built.triton.path)
    assert _run() == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "  venv/bin/vllm-env serve",
        "  venv/bin/vllm-env client --iterations 10",
    ]
    with monkeypatch.context() as patch:
        patch.setattr("sys.argv", [f"{tmp_path}/site/vllm_env/__main__.py"])
        assert _run() == 0
        assert capsys.readouterr().out.splitlines()[-2] == "  vllm-env serve"
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("vllm_env.cli.next_steps.installed_triton", lambda: None)
    assert _run("--model-repository", tmp_path / "mine", "--model", "opt") == 0
    options = f"--model-repository=mine --triton-root={built.triton.path}"
    expected = [f"  vllm-env serve {options}", "  vllm-env client --iterations 10 --model opt"]
    assert capsys.readouterr().out.splitlines()[-2:] == expected


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("folder", "is_linked"), [("my work", False), ("caf\N{LATIN SMALL LETTER E WITH ACUTE}", True)])
def test_a_relative_path_hides_a_space_from_triton_and_no_other_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str, is_linked: bool
) -> None:
    """The stub of 24.10 takes the folder's whole path when it logs, and only in ASCII."""
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    assert _run("--model-repository", "models") == 0
    out = capsys.readouterr().out
    assert ("  ln -sfn " in out) is is_linked
    assert ("--model-store=models\n" in out) is not is_linked


@pytest.mark.usefixtures("built")
def test_next_to_other_models_only_the_built_one_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other model may have no environment, and tritonserver ends if one model fails."""
    for name in ("vllm", "opt"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").touch()
    assert _run("--model-repository", tmp_path / "models", "--model", "opt") == 0
    serve = shlex.split(capsys.readouterr().out.splitlines()[-2])
    assert serve[1:] == [f"--model-store={tmp_path}/models", "--model-control-mode=explicit", "--load-model=opt"]


def test_json_of_a_build_has_all_of_it(built: BuildResult, capsys: pytest.CaptureFixture[str]) -> None:
    """For a program: the manifest as it is in the file, the answers, and the caches of --warm."""
    assert _run("build", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "model": str(built.model),
        "rebuilt": True,
        "smoke_run": [{"prompt": "Hello", "answer": " there"}],
        "served_at": "2026-01-02T03:04:05+00:00",
        "recalled": False,
        "not_served": "",
        "warm": {"folder": str(built.model / "vllm_cache"), "bytes": 2_000_000},
        "manifest": json.loads(built.manifest.to_json()),
    }


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("verbose", [True, False])
def test_a_failure_has_its_tail_its_cause_and_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verbose: bool
) -> None:
    """In this order on stderr, nothing on stdout; a traceback with --verbose alone."""

    def fails(*_: object, **__: object) -> None:
        raise CommandError("Could not x.", tail="said by a program", cause="A cause.", remedy="A remedy.")

    monkeypatch.setattr("vllm_env.cli.main.build", fails)
    assert _run(*(["--verbose"] if verbose else [])) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("said by a program\nerror: Could not x.\n  why: A cause.\n  fix: A remedy.\n")
    assert ("Traceback" in err) is verbose


def test_an_error_of_the_system_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache that cannot be written: reason and file."""

    def fails(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/cache/file")

    monkeypatch.setattr("vllm_env.cli.main.build", fails)
    assert _run() == 1
    assert capsys.readouterr().err == "error: Permission denied: /cache/file\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_exits_with_130(tmp_path: Path, number: signal.Signals) -> None:
    """While it waits for another build's lock: a line, no traceback, status 130, nothing begun."""
    (tmp_path / "cache").mkdir()
    with (tmp_path / "cache/build.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        child = subprocess.Popen(
            [sys.executable, "-m", "vllm_env", "--model-repository", tmp_path / "models"],
            env={**os.environ, "PYTHONPATH": str(CHECKOUT / "env"), "VLLM_ENV_CACHE": str(tmp_path / "cache")},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stderr
        assert "waiting" in child.stderr.readline()
        pause(0.1)
        child.send_signal(number)
        assert child.wait(LIMIT) == 130
        message = child.stderr.read()
        child.stderr.close()
    assert message.startswith("Interrupted")
    assert "Traceback" not in message
    assert not (tmp_path / "models").exists()
