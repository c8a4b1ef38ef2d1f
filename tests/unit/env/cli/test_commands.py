"""The subcommands: what they print, and what ``clean`` frees; nothing long is begun here."""

from __future__ import annotations

import fcntl
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vllm_env.base.cache import Cache
from vllm_env.base.machine import this_platform
from vllm_env.cli.main import main
from vllm_env.serve.leftovers import Abandoned

if TYPE_CHECKING:
    from vllm_env.model.manifest import Manifest

pytestmark = pytest.mark.long


def _run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def test_inspect_prints_a_manifest(model: Path, manifest: Manifest, capsys: pytest.CaptureFixture[str]) -> None:
    """As lines for a user, and as JSON for a program."""
    assert _run("inspect", "--model-repository", model.parent) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["vLLM"] == "0.32.0"
    assert shown["torch"] == "2.13.0+cpu"
    assert shown["stub"] == f"prebuilt, {manifest.stub.sha256[:16]}"
    assert shown["archive"] == f"vllm_env.tar.gz, 0 MB, {manifest.named.sha256[:16]}"
    assert _run("inspect", "--json", "--model-repository", model.parent) == 0
    assert capsys.readouterr().out == manifest.to_json()


def test_a_model_for_another_kind_of_machine_is_named_and_not_started(
    model: Path, manifest: Manifest, capsys: pytest.CaptureFixture[str]
) -> None:
    """A manifest from before there were two kinds is for x86-64."""
    spec = {name: value for name, value in manifest.spec.items() if name != "platform"}
    for platform, other in (("linux/amd64", {}), ("linux/arm64", {"platform": "linux/arm64"})):
        (model / "vllm_env.json").write_text(replace(manifest, spec={**spec, **other}).to_json())
        assert _run("inspect", "--model-repository", model.parent) == 0
        is_foreign = platform != this_platform().name
        sentence = f"This model was built for {platform}, and this machine is {this_platform().name}."
        shown = capsys.readouterr()
        assert f"platform       {platform}\n" in shown.out
        assert (sentence in shown.err) is is_foreign
        assert _run("verify", "--model-repository", model.parent) == 1
        assert (sentence in capsys.readouterr().err) is is_foreign


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_repository_without_a_build_is_a_failure(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a traceback: what to run first."""
    assert _run(command, "--model-repository", tmp_path) == 1
    assert "gen_vllm_env.sh" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_answered_with_those_that_are(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is told to build another model than the one that was named."""
    repository = model.parent

    def said(*options: object) -> str:
        for command in (["inspect"], ["verify"], ["unpack", str(tmp_path / "new")]):
            assert _run(*command, *options) == 1
            last = capsys.readouterr().err
        assert not (tmp_path / "new").exists()
        return last

    among = said("--model-repository", repository, "--model", "nope")
    assert f"Built models in {repository}: vllm." in among
    assert "uild it" not in among
    (repository / "mine").mkdir()
    build = f"Build it: ./gen_vllm_env.sh --model-repository {repository} --model mine."
    assert build in said("--model-repository", repository, "--model", "mine")
    assert f"Write --model-repository {repository} --model vllm." in said("--model-repository", model)
    empty = said("--model-repository", tmp_path / "none", "--model", "my model")
    assert f"{tmp_path / 'none'} has no built model." in empty
    assert f"--model-repository {tmp_path / 'none'} --model 'my model'." in empty


def test_a_wheelhouse_is_filled_where_nothing_could_be_served(
    locked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine with a small /tmp and no GPU, which refuses the build, is good enough to download on."""
    monkeypatch.setattr("vllm_env.sketch.has_gpu", lambda: False)
    monkeypatch.setattr("vllm_env.layout.archive.EXTRACTED_SPACE", {"cuda": 10**18, "cpu": 10**18})
    for options in (
        ["--profile", "cuda", "--warm"],
        ["--profile", "cuda", "--smoke-run"],
        ["--profile", "cpu", "--layout", "archive"],
    ):
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


def test_cleaning_frees_what_killed_builds_and_dead_servers_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with --keep-cache; what a living process has staged stays, and so does all in a dry run."""
    cache = Cache(tmp_path / "cache")
    extracted = tmp_path / "python_env_abc123"
    dead, entry = cache.path("build", "vllm_env-abcd_123"), cache.path("standins", "k")
    for folder in (extracted, dead, entry):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x" * 1000)
    # not those of this machine's /tmp, which tests that run meanwhile may have just made
    monkeypatch.setattr("vllm_env.cli.commands.find_abandoned", lambda: [Abandoned(extracted, 1000)])
    with cache.staging() as living:
        assert _run("clean", "--keep-cache", "--dry-run", "--quiet") == 0
        assert capsys.readouterr().out == "would free 0.0 GB\n"
        assert dead.is_dir()
        assert extracted.is_dir()
        assert _run("clean", "--keep-cache", "--json") == 0
        facts = {"removed": True, "paths": [str(extracted), str(dead)], "bytes": 2000}
        assert json.loads(capsys.readouterr().out) == facts
        assert [path.exists() for path in (extracted, dead, living, entry)] == [False, False, True, True]


def test_cleaning_frees_environments_that_no_server_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two that models in parts have unpacked, the one in use stays."""
    used, unused = 32 * "a", 32 * "b"
    for key in (used, unused):
        (tmp_path / "unpacked" / key).mkdir(parents=True)
        (tmp_path / "unpacked" / f"{key}.lock").touch()
    with (tmp_path / "unpacked" / f"{used}.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert _run("clean", "--keep-cache", "--quiet") == 0
        assert (tmp_path / "unpacked" / unused).is_dir()
        assert _run("clean", "--quiet") == 0
    assert sorted(p.name for p in (tmp_path / "unpacked").iterdir() if p.is_dir()) == [used]
