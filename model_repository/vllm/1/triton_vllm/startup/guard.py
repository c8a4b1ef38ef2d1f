"""End vLLM's processes when the process that owns them dies, and the owner when the server dies.

Otherwise EngineCore and its worker outlive a killed stub and hold the GPU's memory. ``own()`` marks
this process as the owner, and each child watches it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time

from triton_vllm.base.processes import process_space

OWNER_VARIABLE = "TRITON_VLLM_OWNER_PID"
PLACE_VARIABLE = "TRITON_VLLM_OWNER_PLACE"


def own() -> None:
    """Make this process the owner of every process that it starts from now on."""
    owner = str(os.getpid())
    if os.environ.get(OWNER_VARIABLE) != owner:
        # A spawned child starts the watch through the packed environment: a `.pth` file there does
        # so when the variable is set.
        os.environ[OWNER_VARIABLE] = owner
        # Ray copies both variables to other machines, where this process id means nothing. The
        # second one tells where it is valid.
        os.environ[PLACE_VARIABLE] = process_space()
        # A forked child does not read the `.pth` file.
        os.register_at_fork(after_in_child=watch)


def follow_parent() -> None:
    """End this process when its parent is gone."""
    # A stub notices that its server has died, and exits by itself. But it hangs in that exit while
    # other threads run.
    _start(os.getppid())


def watch() -> None:
    """Start a thread that kills this process when its owner is gone."""
    owner = os.environ.get(OWNER_VARIABLE, "")
    if owner.isdigit() and int(owner) != os.getpid():
        _start(int(owner))


def _start(process: int) -> None:
    threading.Thread(target=_watch, args=(process,), name="triton-owner-watch", daemon=True).start()


def _watch(owner: int) -> None:
    _wait_for_end(owner)
    # SIGKILL, because an orderly exit could hang while other threads run.
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_end(owner: int) -> None:
    """Return when the process ``owner`` has ended."""
    try:
        # A process descriptor becomes readable when its process has ended. ``select.select`` takes
        # no descriptor of 1024 or more.
        end = select.poll()
        end.register(os.pidfd_open(owner), select.POLLIN)
        events = end.poll()
    except ProcessLookupError:
        return
    # an old kernel, or a container that forbids the call
    except (OSError, AttributeError):
        events = []
    # Any other event says nothing about the process: POLLNVAL, for example, means that other code
    # in this process has closed the descriptor.
    has_ended = any(event & select.POLLIN for _, event in events)
    if not has_ended:
        _poll(owner)


def _poll(owner: int) -> None:
    """Return when the process ``owner`` has ended; look every second."""
    # Signal 0 only asks whether the process exists.
    with contextlib.suppress(ProcessLookupError):
        while True:
            # PermissionError means that the owner lives, as another user.
            with contextlib.suppress(PermissionError):
                os.kill(owner, 0)
            time.sleep(1)
