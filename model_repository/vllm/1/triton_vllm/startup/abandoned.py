"""End a load that the server has abandoned.

Without this, the server waits for this process to end, and this process waits for a request.

While a stub loads a model, Triton 24.10 checks every second whether the stub is alive. If the
machine pauses for a second, the stub cannot answer, and Triton takes it for dead. Triton then waits
for its end, without a limit and without ending it (python_backend, src/stub_launcher.cc: `Launch`
and `WaitForStubProcess`). Newer releases wait five seconds. Once this process has ended, the server
reports the failed load.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PERIOD_S = 1.0
_SERVER = "tritonserver"  # the parent's name is checked because a shell, too, waits for what it has started
_STATUS = 1
_REASON = (
    b"[triton_vllm] the server has given this load up and waits for this process to end: Triton 24.10 takes for dead what a "
    b"pause of the machine keeps from answering for a second. This process ends; the server can be started again.\n"
)


class AbandonedLoad:
    """Check every second whether the server has abandoned the load, and end this process then.

    A context manager around the load.

    Args:
        waits: returns whether the server waits for this process to end.
        end: ends this process with a status.
        period_s: seconds between two checks.
    """

    def __init__(
        self,
        waits: Callable[[], bool] | None = None,
        end: Callable[[int], object] = os._exit,
        period_s: float = PERIOD_S,
    ) -> None:
        self._waits = waits or _waits_for_this_process
        self._end = end
        self._period_s = period_s
        self._loaded = threading.Event()
        self._thread = threading.Thread(target=self._run, name="triton-abandoned-load", daemon=True)

    def __enter__(self) -> AbandonedLoad:  # noqa: PYI034 - Self is not in the typing of Python 3.10
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loaded.set()
        self._thread.join()

    def _run(self) -> None:
        loaded = False
        while not loaded:
            loaded = self._loaded.wait(self._period_s)
            if self._waits() and self._still():
                _tell()
                self._end(_STATUS)

    def _still(self) -> bool:
        # seen once and not again, the wait was for something else
        time.sleep(self._period_s)
        return self._waits()


def _tell() -> None:
    """Write the reason to stderr, and wait at most a second for that: the reader may be gone, or not read.

    Triton's log cannot be used. For each line the server waits for an answer from the process that
    wrote it, even if that process has ended.
    """

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(2, _REASON)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(1.0)


def _waits_for_this_process() -> bool:
    server = os.getppid()
    return _read(Path(f"/proc/{server}/comm")).strip() == _SERVER and waits(server, os.getpid())


def waits(server: int, process: int) -> bool:
    """Return whether the thread of `server` that started `process` waits for a child to end.

    While that thread loads a model, it has no other child to wait for. Return False if the kernel
    does not say.
    """
    for thread in Path(f"/proc/{server}/task").glob("*"):  # empty if the server is gone
        if str(process) in _read(thread / "children").split():
            return _read(thread / "wchan") == "do_wait"
    return False


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:  # the thread has just ended, or this kernel has no such file
        return ""
