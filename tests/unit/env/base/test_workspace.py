"""What every stage is handed: frozen, with a cache that one build at a time holds."""

from __future__ import annotations

import dataclasses
import multiprocessing
from typing import TYPE_CHECKING

import pytest

from support.patience import LIMIT
from vllm_env.base.cache import Cache
from vllm_env.base.locks import locked
from vllm_env.base.report import Console, reporting_to
from vllm_env.base.workspace import Workspace

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event
    from pathlib import Path


def _hold(place: Path, held: Event, release: Event) -> None:
    with locked(place, lambda: None):
        held.set()
        release.wait(LIMIT)


def test_it_is_made_once(tmp_path: Path) -> None:
    """No stage changes what another one sees."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Workspace(Cache(tmp_path)).cache = Cache(tmp_path / "other")  # type: ignore[misc]


def test_one_build_at_a_time_holds_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second one says that it waits, and goes on when the first has ended."""
    workspace = Workspace(Cache(tmp_path / "cache"))
    with workspace.exclusive():
        assert capsys.readouterr().err == ""
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path / "cache/build.lock", held, release))
    holder.start()
    try:
        assert held.wait(LIMIT)
        noted: list[str] = []

        def note(text: str) -> None:
            noted.append(text)
            release.set()

        console = Console()
        console.note = note  # type: ignore[method-assign]
        with reporting_to(console), workspace.exclusive():
            pass
    finally:
        release.set()
        holder.join()
    assert noted == ["another build is running; waiting for it to end"]
