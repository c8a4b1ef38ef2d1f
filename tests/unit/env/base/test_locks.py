"""Advisory locks: one holder, told once, and free as soon as the holder is gone."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support.patience import LIMIT
from vllm_env.base import locks
from vllm_env.base.locks import locked, locked_folder, remove_unlocked, take_lock

ENV = Path(locks.__file__).parents[2]
_HOLD = """
import sys, time
from pathlib import Path
from vllm_env.base.locks import locked
with locked(Path(sys.argv[1]), lambda: None):
    print("in", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_second_holder_waits_and_is_told_once(tmp_path: Path, kind: str) -> None:
    """The other goes on when the first is done, not before."""
    place = tmp_path if kind == "folder" else tmp_path / "lock"
    order: list[str] = []
    inside, told = threading.Event(), threading.Event()

    def first() -> None:
        with locked(place, lambda: order.append("first waits")):
            inside.set()
            assert told.wait(LIMIT)
            order.append("first done")

    def waiting() -> None:
        order.append("second waits")
        told.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(LIMIT)
    with locked(place, waiting):
        order.append("second in")
    thread.join()
    assert order == ["second waits", "first done", "second in"]


def test_one_that_has_waited_is_the_only_holder(tmp_path: Path) -> None:
    """As if it had not waited."""
    holder = take_lock(tmp_path, fcntl.LOCK_EX)
    with locked(tmp_path, lambda: os.close(holder)), pytest.raises(BlockingIOError):
        take_lock(tmp_path, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    """The kernel releases the lock: no stale lock file can block the next build."""
    env = {**os.environ, "PYTHONPATH": str(ENV)}
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(tmp_path)], env=env, stdout=subprocess.PIPE)
    assert holder.stdout
    assert holder.stdout.readline() == b"in\n"
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with locked(tmp_path, lambda: pytest.fail("it waits for a dead process")):
        pass


def test_a_locked_folder_stays_and_an_abandoned_one_goes(tmp_path: Path) -> None:
    """While it is used nobody removes it; afterwards it is gone by itself."""
    with locked_folder(tmp_path, "staging-") as folder:
        assert not remove_unlocked(folder)
        assert folder.is_dir()
    assert not folder.exists()
    folder.mkdir()
    assert remove_unlocked(folder, dry_run=True)
    assert folder.is_dir()
    assert remove_unlocked(folder)
    assert not folder.exists()


def test_a_folder_that_others_share_stays(tmp_path: Path) -> None:
    """Such as the tools of a running packager, which has only a shared lock."""
    folder = tmp_path / "tools"
    folder.mkdir()
    handle = take_lock(folder, fcntl.LOCK_SH)
    assert not remove_unlocked(folder)
    assert folder.is_dir()
    os.close(handle)
    assert remove_unlocked(folder)


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as NFS whose lock service does not run. The kernel's error has no path."""

    def no_lock_service(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_lock_service)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="use a folder on a local disk") as caught, locked(tmp_path, lambda: None):
        pass
    assert (caught.value.errno, caught.value.filename) == (errno.ENOLCK, str(tmp_path))
    assert not remove_unlocked(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == opened
