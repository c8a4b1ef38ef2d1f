"""A load is asked for again only if the server has given it up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support import model_control
from support.model_control import GIVEN_UP, LOADS, NOTICED, load

if TYPE_CHECKING:
    from pathlib import Path


class Server:
    """A server's log, with a line from an earlier load."""

    def __init__(self, log: Path) -> None:
        self.log = log
        log.write_text(f"{NOTICED}\n")

    def members(self) -> list[Any]:
        """The process that was given up has ended."""
        return []


@pytest.mark.parametrize(
    ("told", "logged", "loads"),
    [(GIVEN_UP, "", LOADS), ("the first instance ended", NOTICED, LOADS), ("a wrong argument", "", 1)],
    ids=["the answer says so", "the log says so", "neither"],
)
def test_only_a_load_that_was_given_up_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, logged: str, loads: int
) -> None:
    """With several instances, the answer may be the error of another one."""
    server: Any = Server(tmp_path / "log")
    asked = []

    def control(_: Any, name: str, verb: str) -> tuple[int, str]:
        asked.append((name, verb))
        with server.log.open("a") as log:
            log.write(logged)
        return 400, told

    monkeypatch.setattr(model_control, "_control", control)
    assert load(server) == (400, told)
    assert asked == [("vllm", "load")] * loads
