"""Publishing is killed at any moment, many times: a reader finds the old set or the new."""

from __future__ import annotations

import json
import os
import random
import signal
from typing import TYPE_CHECKING

import pytest

from support import publisher
from support.patience import LIMIT, pause
from support.repositories import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

_TEMPLATE = CHECKOUT / "model_repository" / "vllm"


def _kill_at_random(folder: Path, number: signal.Signals, longest: float, *, in_place: bool) -> None:
    child, _ = publisher.start(folder, _TEMPLATE, in_place=in_place)
    pause(random.uniform(0, longest))
    assert child.pid
    os.kill(child.pid, number)
    child.join()
    assert child.exitcode == -number


def _interrupt_when_published(folder: Path, *, in_place: bool) -> None:
    child, published = publisher.start(folder, _TEMPLATE, in_place=in_place)
    assert published.acquire(timeout=LIMIT)
    assert child.pid
    os.kill(child.pid, signal.SIGINT)
    child.join()


def _tags(model: Path) -> set[str]:
    texts = [(model / name).read_text() for name in ("triton_python_backend_stub", "vllm_env.tar.gz")]
    assert {len(text) for text in texts} == {publisher.SIZE}
    return {json.loads((model / "vllm_env.json").read_text())["tag"], *(text[0] for text in texts)}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The folder that holds the repository and, for a moment, the staging."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_publish_leaves_a_whole_set(tmp_path: Path, place: Path, number: signal.Signals) -> None:
    """25 kills at random moments of publishing without pause: never a mix, and the next one removes what was staged."""
    for _ in range(25):
        _kill_at_random(tmp_path, number, 0.15, in_place=False)
        if (place / "models" / "vllm").exists():
            assert len(_tags(place / "models" / "vllm")) == 1
            assert (place / "models" / "vllm" / "1" / "model.py").is_file()
    _interrupt_when_published(tmp_path, in_place=False)
    assert [p.name for p in place.iterdir()] == ["models"]


def test_a_publish_in_place_mends_what_a_crash_tore(tmp_path: Path, place: Path) -> None:
    """Where no exchange is possible each file is whole, and the next run completes the set."""
    model = place / "models" / "vllm"
    for _ in range(15):
        _kill_at_random(tmp_path, signal.SIGKILL, 0.1, in_place=True)
        if (model / "vllm_env.json").exists():
            _tags(model)  # every file is one of the two, none is cut off
    _interrupt_when_published(tmp_path, in_place=True)
    assert (model / "config.pbtxt").is_file()
    assert (model / "1" / "model.py").is_file()
    assert not [p for p in model.iterdir() if p.name.startswith(".vllm_env.staging")]
