"""A load that the server has given up ends its process, and no other does."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support.patience import LIMIT, wait_for
from triton_vllm.startup import abandoned
from triton_vllm.startup.abandoned import AbandonedLoad


class Server:
    """Waits for the process to end, or does not: what is told by and by, the last for ever."""

    def __init__(self, *waits: bool) -> None:
        self.waits = list(waits)
        self.looks = 0
        self.ended: list[int] = []

    def look(self) -> bool:
        """Tell the next."""
        self.looks += 1
        return self.waits.pop(0) if len(self.waits) > 1 else self.waits[0]

    def load(self) -> AbandonedLoad:
        """Return a load that this server waits for."""
        return AbandonedLoad(self.look, self.ended.append, period_s=0.01)


def test_a_load_that_ends_before_the_next_look() -> None:
    """There is a last look, or the two would wait for each other from here on."""
    server = Server(True)
    load = AbandonedLoad(server.look, server.ended.append, period_s=0.01)
    load._loaded.set()
    with load:
        pass
    assert server.ended == [1]


def test_a_wait_that_is_not_for_this_process() -> None:
    """Seen once and not again, it ends nothing."""
    server = Server(False, True, False)
    with server.load():
        wait_for(lambda: server.looks >= 5, "the fifth look")
    assert not server.ended
    assert not any(thread.name == "triton-abandoned-load" for thread in threading.enumerate())


@pytest.mark.parametrize("full", [True, False])
def test_nobody_reads_what_it_says(monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """A closed stderr is an error, and a full pipe a wait for ever: the process ends all the same."""

    def write(_: int, __: bytes) -> int:
        if full:
            threading.Event().wait()
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", write)
    server = Server(True)
    with server.load():
        pass
    assert server.ended


def test_the_kernel_tells_who_waits() -> None:
    """The thread that started the process is asked, not another of its process, and not about another's child."""
    children: list[subprocess.Popen[bytes]] = []
    began = threading.Event()

    def start_and_wait() -> None:
        children.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        began.set()
        with contextlib.suppress(ChildProcessError):  # `communicate` may have been told first
            os.waitpid(children[0].pid, 0)

    idle = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    thread = threading.Thread(target=start_and_wait)
    thread.start()
    assert began.wait(LIMIT)
    try:
        wait_for(lambda: abandoned.waits(os.getpid(), children[0].pid), "the wait for the child")
        assert not abandoned.waits(os.getpid(), idle.pid)
        assert not abandoned.waits(os.getpid(), os.getpid())
    finally:
        for child in (*children, idle):
            child.communicate(b"\n")
        thread.join()


def test_a_process_that_is_no_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell waits for what it has started, too. A stub's parent may have any name: a front end embeds Triton."""
    monkeypatch.setattr(abandoned, "waits", lambda *_: True)
    assert not abandoned._waits_for_this_process()
    monkeypatch.setattr(Path, "readlink", lambda _: Path("/models/vllm/triton_python_backend_stub"))
    assert abandoned._waits_for_this_process()
