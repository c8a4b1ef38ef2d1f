"""End a load that the server has abandoned.

While a stub loads a model, Triton 24.10 checks every second whether the stub is alive. If the
machine pauses for a second, the stub cannot answer, and Triton takes it for dead. Triton then waits
for its end, without a limit and without ending it (python_backend, src/stub_launcher.cc: ``Launch``
and ``WaitForStubProcess``). Newer releases wait five seconds.

Meanwhile this process would wait for a request. Once it has ended, the server reports the failed
load.
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
# Only a stub's parent is a server: tritonserver, Triton's OpenAI front end, or another program that
# embeds Triton. A shell, too, waits for the programs that it has started.
_STUB_NAME = "triton_python_backend_stub"
_REASON = (
    b"[triton_vllm] the server has given this load up and waits for this process to end: "
    b"if the machine pauses for a second, Triton 24.10 takes a loading model for dead. "
    b"This process ends; start the server again.\n"
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
        # The thread looks a last time after this. Without that look, a server that gave the load up
        # just now would wait for ever.
        self._loaded.set()
        self._thread.join()

    def _run(self) -> None:
        """Look every period, and once more after the load; end this process if it is abandoned.

        It is abandoned if the server waits for its end at two looks, one period apart.
        """
        loaded = False
        while not loaded:
            # Returns at once when the load is over.
            loaded = self._loaded.wait(self._period_s)
            if self._waits():
                # A wait that is over after a period was for something else.
                time.sleep(self._period_s)
                if self._waits():
                    _write_reason()
                    self._end(1)


def _write_reason() -> None:
    """Write the reason to stderr, and wait at most a second for that."""
    # Triton's log cannot be used. For each line the server waits for an answer from the process
    # that wrote it, even if that process has ended.

    # The reader of stderr may be gone, which is an error, or may not read, which blocks the thread.
    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(2, _REASON)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(1.0)


def _waits_for_this_process() -> bool:
    """Return whether this process is a stub, and its server waits for it to end."""
    try:
        program = Path("/proc/self/exe").readlink().name
    except OSError:
        return False
    # A new build may have replaced the stub since.
    is_stub = program.removesuffix(" (deleted)") == _STUB_NAME
    return is_stub and waits(os.getppid(), os.getpid())


def waits(server: int, process: int) -> bool:
    """Return whether the thread of ``server`` that started ``process`` waits for a child to end.

    Args:
        server: the id of the parent process.
        process: the id of its child.

    Returns:
        False also if the kernel does not say.
    """
    # proc(5): `children` has the processes that this thread has started, and `wchan` the function
    # of the kernel in which it sleeps.
    for thread in Path(f"/proc/{server}/task").glob("*"):
        if str(process) in _read(thread / "children").split():
            # While the thread loads a model, it has no other child to wait for.
            return _read(thread / "wchan") == "do_wait"
    return False


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:  # the thread has just ended, or this kernel has no such file
        return ""
