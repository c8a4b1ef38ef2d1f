"""Hold SIGINT and SIGTERM back while a new process or folder is not yet registered for clean-up.

Without this, a program that started at the moment of a Ctrl-C was not ended. It wrote on until this process ended. In 15
of 120 tries on a busy machine, it filled a staging folder that had just been removed.

The signals are not blocked: another thread, of OpenBLAS or gRPC, would receive them. Their handler only makes a note.
A second signal is not held back, because the held block may hang in a driver or on a network file system.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from functools import partial


class _State:
    """Whether signals are held back, and whether one has arrived meanwhile; process-wide, as signal handlers are."""

    held = False
    waiting = False


def take_interrupts() -> None:
    """Let SIGINT (unless it is ignored) and SIGTERM raise KeyboardInterrupt, at once or when they are no longer held back."""
    _State.held = _State.waiting = False
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Hold interrupts back until the block ends; an inner ``with`` on the yielded function lets them through."""
    before = _State.held
    with _held(held=True):
        yield partial(_held, held=before)


@contextlib.contextmanager
def _held(*, held: bool) -> Iterator[None]:
    before, _State.held = _State.held, held
    try:
        _raise_waiting()
        yield
    finally:
        _State.held = before
        _raise_waiting()


def _interrupt(*_: object) -> None:
    if _State.waiting or not _State.held:
        _State.waiting = False
        raise KeyboardInterrupt
    _State.waiting = True


def _raise_waiting() -> None:
    if _State.waiting and not _State.held:
        _State.waiting = False
        raise KeyboardInterrupt
