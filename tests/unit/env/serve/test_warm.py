"""Warming: what is kept, where, and what a failure leaves. The server here only does what it is told."""

from __future__ import annotations

import fcntl
import os
import stat
from typing import TYPE_CHECKING

import pytest

from support import fake_tritonserver
from support.small_fixtures import workspace_in
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.serve import warm as module
from vllm_env.serve.warm import Warmed, warm

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.long


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    """A server that is ready at once; FAKE_TRITON=fills makes it fill caches."""
    return fake_tritonserver.launcher(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text("")
    return folder


@pytest.fixture(params=[None, "older"])
def older(request: pytest.FixtureRequest, model: Path) -> str | None:
    """Caches of an earlier warm run, or none."""
    if request.param:
        (model / "vllm_cache").mkdir()
        (model / "vllm_cache" / "warm.json").write_text(request.param)
    return request.param


def run(binary: Path, model: Path) -> Warmed:
    place = model.parent.parent
    return warm(workspace_in(place / "cache"), binary, model, log=place / "server.log")


def names(model: Path) -> list[str]:
    return sorted(str(p.relative_to(model)) for p in model.rglob("*") if p.is_file())


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.usefixtures("older")
def test_what_was_filled_is_kept(binary: Path, model: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of older caches, readable for every user, without what is true of this machine only."""
    if not exchanges:
        monkeypatch.setattr(module, "exchange", lambda *_: False)
    monkeypatch.setenv("FAKE_TRITON", "fills")
    done = run(binary, model)
    assert names(model) == ["config.pbtxt", "vllm_cache/kernels/one", "vllm_cache/warm.json"]
    assert (model / "vllm_cache/warm.json").read_text() == "new"
    assert stat.S_IMODE((model / "vllm_cache/kernels/one").stat().st_mode) == 0o644
    assert stat.S_IMODE((model / "vllm_cache/kernels").stat().st_mode) == 0o755
    assert (done.folder, done.files, done.size) == (model / "vllm_cache", 2, 6)
    log = (model.parent.parent / "server.log").read_text()
    assert '"load-model": "mine"' in log  # and no other of the repository
    assert '"model-control-mode": "explicit"' in log


def test_a_load_that_fails_leaves_what_was_there(
    binary: Path, model: Path, older: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the input, the server's reason and the remedy; no staging folder stays."""
    monkeypatch.setenv("FAKE_TRITON", "fills broken")
    with pytest.raises(CommandError) as caught:
        run(binary, model)
    error = caught.value
    assert "mine did not load with its own vllm_engine_args.json" in error.what
    assert error.cause == 'model.json: "model" is missing'
    assert error.tail == ""
    assert " ".join(error.lines()).count("The whole log is") == 1
    assert str(model / "vllm_engine_args.json") in error.remedy
    assert [p.name for p in model.iterdir() if p.name != "config.pbtxt"] == (["vllm_cache"] if older else [])
    assert not older or (model / "vllm_cache/warm.json").read_text() == older


def test_a_model_that_fills_nothing_is_refused(
    binary: Path, model: Path, older: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older 1/model.py knows nothing of warming: its caches lie elsewhere, and an empty folder would be no cache."""
    monkeypatch.setenv("FAKE_TRITON", "")
    with pytest.raises(VllmEnvError, match="left no caches"):
        run(binary, model)
    assert not older or (model / "vllm_cache/warm.json").read_text() == older


@pytest.mark.usefixtures("older")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for others")
def test_the_caches_belong_to_the_owner_of_the_models_folder(binary: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warmed as root in a container: a host user can remove them."""
    os.chown(model, 12345, 23456)
    monkeypatch.setenv("FAKE_TRITON", "fills")
    done = run(binary, model)
    owners = {(p.stat().st_uid, p.stat().st_gid) for p in (done.folder, *done.folder.rglob("*"))}
    assert owners == {(12345, 23456)}


@pytest.mark.parametrize("step", ["remove_abandoned_staging", "_place"])
def test_it_waits_for_a_publish_of_another_container(
    binary: Path, model: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Publishing exchanges the model's folder: what is staged or placed in the old one meanwhile would be lost."""
    held: list[bool] = []
    real = getattr(module, step)

    def observed(*arguments: object) -> object:
        handle = os.open(model.parent, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.append(True)
        finally:
            os.close(handle)
        return real(*arguments)

    monkeypatch.setattr(module, step, observed)
    monkeypatch.setenv("FAKE_TRITON", "fills")
    run(binary, model)
    assert held == [True]
