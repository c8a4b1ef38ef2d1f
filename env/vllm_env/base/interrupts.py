"""Hold SIGINT and SIGTERM back while a new process or folder is not yet registered for clean-up.

Without this, a program that started at the moment of a Ctrl-C was not ended. It wrote on until this
process ended. In 15 of 120 tries on a busy machine, it filled a staging folder that had just been
removed.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial


class _State:
    """The state of the handlers, one for the process as they are.

    Attributes:
        is_holding: whether signals are held back.
        is_waiting: whether one has arrived meanwhile.
    """

    is_holding = False
    is_waiting = False


def take_interrupts() -> None:
    """Let SIGINT and SIGTERM raise a KeyboardInterrupt, as soon as they are not held back."""
    # A container's end sends SIGTERM.
    signal.signal(signal.SIGTERM, _interrupt)
    # A shell starts background programs with SIGINT ignored, and nohup(1) does so, too.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    # bootstrap.py blocks it while the packager starts. One that came meanwhile is raised here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Hold interrupts back while the block runs.

    The yielded function returns a context manager, which lets them through while its block runs.
    In any thread but the main one, this does nothing.
    """
    # Inside another held block, "through" means: as that block has it.
    before = _State.is_holding
    with _switched(is_holding=True):
        yield partial(_switched, is_holding=before)


@contextlib.contextmanager
def _switched(*, is_holding: bool) -> Iterator[None]:
    """Hold interrupts back or let them through while the block runs; then restore what was before.

    Raises:
        KeyboardInterrupt: one was held back, and is let through now.
    """
    # Python runs signal handlers in the main thread only. If another thread changed this state as
    # well, each could restore what the other had set. The signals could stay held back for ever.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _State.is_holding
    # Only the handler holds them back. If this thread blocked the signals, another one, of OpenBLAS
    # or gRPC, would receive them.
    try:
        _State.is_holding = is_holding
        _raise_waiting()
        yield
    finally:
        _State.is_holding = before
        _raise_waiting()


def _interrupt(*_: object) -> None:
    """Handle a signal: remember it while signals are held back, else raise a KeyboardInterrupt."""
    # A second signal is not held back: the block may hang in a driver or a network file system.
    if _State.is_holding and not _State.is_waiting:
        _State.is_waiting = True
        return
    _State.is_waiting = False
    raise KeyboardInterrupt


def _raise_waiting() -> None:
    """Raise the KeyboardInterrupt of a signal that was held back, once this is over."""
    if _State.is_waiting and not _State.is_holding:
        _State.is_waiting = False
        raise KeyboardInterrupt
