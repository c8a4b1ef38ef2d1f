"""Which tests one worker runs: those that share a server, else those of a file.

xdist's own groups (`--dist loadgroup` of 3.8) stand in the tests' ids, where pytest 9.2 no longer takes them from.
"""

from __future__ import annotations

import json
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from xdist.scheduler import LoadScopeScheduling

from support.once import once, run_folder

if TYPE_CHECKING:
    import pytest

# Servers that several files share, by their fixtures: each worker that ran a test with one of these would start its own.
_SHARED = (
    "long_server",
    "wide_server",
    "llama_server",
    "embedding_server",
    "chat_server",
    "vision_server",
    "first_start",
    "light_server",
    "lane",
)
# In this order workers end at about the same time: what serves a model takes longest, and unit tests fill what is left.
# Tests of interrupts come first: they can run while the first end-to-end test builds the environment that all others need.
_ORDER = ("tests/chaos", "tests/e2e/test_published.py", "tests/e2e", "tests/hostile", "tests/integration", "")
# On a fresh machine that build takes minutes, in which the other workers run what needs no environment.
_FRESH_ORDER = ("tests/chaos", "tests/e2e/test_published.py", "tests/unit", "tests/e2e", "tests/hostile", "tests/integration", "")
_NOTE = "groups.json"


def sort_and_note(items: list[pytest.Item]) -> None:
    """In a worker: put the tests in order, and note each test's group for the process that hands them out."""
    sort(items, _FRESH_ORDER if _is_fresh() else _ORDER)
    note = run_folder() / f"{os.getpid()}.json"
    note.write_text(json.dumps({item.nodeid: group(item) for item in items}), encoding="utf-8")
    note.replace(run_folder() / _NOTE)  # all workers write the same


def sort(items: list[pytest.Item], order: tuple[str, ...]) -> None:
    """Sort by the places in ``order``; tests that end a server come last, because a group's tests may be in several places."""

    def key(item: pytest.Item) -> tuple[bool, int]:
        ends = item.get_closest_marker("ends_server") is not None
        return ends, next(number for number, place in enumerate(order) if item.nodeid.startswith(place))

    items.sort(key=key)


def _is_fresh() -> bool:
    """Return whether no environment was built before this run; all workers give the answer of the first."""
    cache = Path.home() / ".cache" / "vllm_env" / "prefixes"
    found = once("prefixes", lambda folder: cache if any(cache.glob("*")) else folder)
    return found != cache


def group(item: pytest.Item) -> str:
    """Name an item's group: what its mark says, else a fixture, else its file."""
    mark = item.get_closest_marker("xdist_group")
    if mark:
        return str(mark.args[0])
    used = getattr(item, "fixturenames", ())
    return next((name for name in _SHARED if name in used), item.nodeid.partition("::")[0])


def end_servers(item: pytest.Item, following: pytest.Item | None) -> None:
    """Stop the servers that a test's group shares, once its last test in this worker has ended: idle ones fill the memory."""
    if following is not None and group(following) == group(item):
        return
    manager = item.session._fixturemanager
    request = cast("Any", item)._request
    for name in _SHARED:  # a test may ask for one by `request.getfixturevalue`, so that its own list does not have it
        for definition in manager.getfixturedefs(name, item) or ():
            definition.finish(request)  # what depends on the fixture is finished before; it can be made again


class GroupScheduling(LoadScopeScheduling):
    """Hands out whole groups, in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    @cached_property
    def _groups(self) -> dict[str, str]:
        return dict(json.loads((run_folder() / _NOTE).read_text(encoding="utf-8")))

    def _split_scope(self, nodeid: str) -> str:
        return self._groups[nodeid]
