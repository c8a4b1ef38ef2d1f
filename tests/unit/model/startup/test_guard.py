"""Children end when the process that owns them is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.patience import wait_for
from triton_vllm.startup import guard

PACKAGE = Path(__file__).parents[4] / "model_repository" / "vllm" / "1"
OWNER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from triton_vllm.startup import guard
guard.own()
pid = os.fork()
if pid == 0:
    grandchild = os.fork()
    if grandchild:
        print(os.getpid(), grandchild, flush=True)
    time.sleep(600)
else:
    time.sleep(600)
"""


PARENT = """
import subprocess, sys, time
code = (
    "import os, sys, time; sys.path.insert(0, sys.argv[1]); from triton_vllm.startup import guard; "
    "guard.follow_parent(); print(os.getpid(), flush=True); time.sleep(600)"
)
subprocess.run([sys.executable, "-c", code, sys.argv[1]])
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def killed_with_their_ancestor(code, number):
    """Whether the processes whose ids `code` prints are gone after SIGKILL to the one that runs it."""
    ancestor = subprocess.Popen([sys.executable, "-c", code, str(PACKAGE)], stdout=subprocess.PIPE, text=True)
    assert ancestor.stdout is not None
    pids = [int(p) for p in ancestor.stdout.readline().split()]
    try:
        assert len(pids) == number
        assert all(map(alive, pids))
        ancestor.kill()
        ancestor.wait()
        wait_for(lambda: not any(map(alive, pids)), "the end of the processes")
        return True
    finally:
        ancestor.stdout.close()
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_forked_children_and_grandchildren_die_with_the_owner():
    """EngineCore and Worker are child and grandchild; SIGKILL gives the owner no chance to end them."""
    assert killed_with_their_ancestor(OWNER, 2)


@pytest.mark.parametrize(("event", "asks_again"), [(select.POLLIN, False), (select.POLLNVAL, True), (select.POLLERR, True)])
def test_only_the_end_of_the_owner_counts_as_its_end(event, asks_again, monkeypatch):
    """If other code closes the descriptor, poll returns as well, and the owner may live."""
    polled = SimpleNamespace(register=lambda *_: None, poll=lambda: [(3, event)])
    monkeypatch.setattr(select, "poll", lambda: polled)
    monkeypatch.setattr(os, "pidfd_open", lambda process: 3)
    asked: list[int] = []
    monkeypatch.setattr(guard, "_poll", asked.append)
    guard._wait_for_end(os.getpid())
    assert asked == [os.getpid()] * asks_again


def test_the_owner_dies_with_the_server():
    """The stub's own exit hangs after its server was killed, and would keep the engine."""
    assert killed_with_their_ancestor(PARENT, 1)
