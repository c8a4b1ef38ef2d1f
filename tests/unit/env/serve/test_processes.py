"""Which processes belong to a server, what they have open, and that all of them can be ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from vllm_env.serve.processes import MARKER_VARIABLE, end, is_alive, members, traces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Start = Callable[..., psutil.Popen]

_SLEEP = "import time; time.sleep(600)"
_TELLS = f"print(flush=True); {_SLEEP}"
# starts a process in a session of its own, without the marker, and tells its id
_PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {_SLEEP!r}], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""
_DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
_NOBODY = -2  # no process's id


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python code in a session of its own; what is left of it is killed afterwards."""
    with ExitStack() as stack:

        def begin(code: str, *arguments: str, **options: Any) -> psutil.Popen:
            command = [sys.executable, "-c", code, *arguments]
            process = psutil.Popen(command, **{"start_new_session": True, "stdout": subprocess.PIPE, **options})
            stack.callback(_reap, process)
            return process

        yield begin


def _reap(process: psutil.Popen) -> None:
    with suppress(psutil.NoSuchProcess):
        for child in (*process.children(recursive=True), process):
            child.kill()
    process.wait()
    process.stdout.close()


def _zombie(start: Start) -> psutil.Popen:
    process = start("")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process.status() == psutil.STATUS_ZOMBIE
    return process


def _child_of(parent: psutil.Popen) -> psutil.Process:
    return psutil.Process(int(parent.stdout.readline()))


def test_a_marked_process_is_a_member_wherever_it_runs(start: Start) -> None:
    """vLLM's processes lead sessions of their own and outlive the process that started them."""
    marked = start(_TELLS, env={**os.environ, MARKER_VARIABLE: "mine"})
    start(_SLEEP, env={**os.environ, MARKER_VARIABLE: "mine too"})
    # In the midst of its exec(), a process has no variables.
    marked.stdout.readline()
    assert members(_NOBODY, "mine") == [marked]


def test_a_members_descendants_are_members(start: Start) -> None:
    """A child in a session of its own, without the marker, while its parent lives."""
    parent = start(_PARENT)
    child = _child_of(parent)
    assert {process.pid for process in members(parent.pid, "no such marker")} == {parent.pid, child.pid}


def test_an_orphan_is_found_by_an_earlier_look(start: Start) -> None:
    """Neither session, marker nor parent tell of it any more."""
    parent = start(_PARENT)
    child = _child_of(parent)
    known = members(parent.pid, "no such marker")
    assert child in known
    parent.kill()
    parent.wait()
    assert members(parent.pid, "no such marker") == []
    assert members(parent.pid, "no such marker", known) == [child]
    end([child], grace=60)


def test_zombies_and_this_process_are_no_members(start: Start) -> None:
    """A dead child whose parent has not asked for its status needs no ending, and the packager must not end itself."""
    zombie = _zombie(start)
    assert not is_alive(zombie)
    assert members(zombie.pid, "no such marker", [zombie]) == []
    assert os.getpid() not in {process.pid for process in members(os.getsid(0), "no such marker", [psutil.Process()])}


def test_traces_are_found_while_the_processes_live(start: Start) -> None:
    """An extracted environment by a library that is mapped, and shared memory by a variable or an argument."""
    folder = Path(tempfile.mkdtemp(prefix="python_env_", dir="/tmp"))
    (folder / "library").write_bytes(b"x" * 5000)
    code = (
        "import mmap, sys, time; file = open(sys.argv[1], 'rb'); "
        "mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ); print(flush=True); time.sleep(600)"
    )
    try:
        variables = {**os.environ, "REGION": "/dev/shm/psm_12345678"}
        using = start(code, str(folder / "library"), "/dev/shm/sem.mp-abcdefgh", env=variables)
        using.stdout.readline()
        other = start(_SLEEP, "/dev/shm/somebody_elses")
        assert traces([using]) == {folder, Path("/dev/shm/psm_12345678"), Path("/dev/shm/sem.mp-abcdefgh")}
        assert traces([other]) == set()
        extracting = start(_SLEEP, cwd=folder)
        assert traces([extracting]) == {folder}
    finally:
        shutil.rmtree(folder)


def test_processes_are_asked_before_they_are_killed(start: Start) -> None:
    """SIGTERM lets a server tidy up; what ignores it is killed after the grace."""
    deaf, willing = start(_DEAF), start(_SLEEP)
    assert deaf.stdout.readline() == b"deaf\n"
    end([willing], grace=60)
    end([deaf], grace=0.5)
    assert (deaf.wait(), willing.wait()) == (-signal.SIGKILL, -signal.SIGTERM)


def test_a_later_process_with_the_same_id_is_another(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are used again: what was noted of a dead process must not hit the one that has its number now."""
    now = start(_SLEEP)
    before = psutil.Process(now.pid)
    monkeypatch.setattr(before, "_ident", (now.pid, 1.0))  # as if it had begun in 1970
    assert not is_alive(before)
    assert members(_NOBODY, "no such marker", [before]) == []
    end([before], grace=0)
    assert is_alive(now)
