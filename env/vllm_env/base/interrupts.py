"""SIGINT and SIGTERM wait while something has been made that nothing would undo yet.

A program that was started in the moment of a Ctrl-C was known to nobody and wrote on for as long as this process took to
end (in 15 of 120 tries on a busy machine it filled a staging folder that had just been removed). The signals are not
blocked, as another thread, of OpenBLAS or gRPC, would take them; their handler makes a note. One that comes while another
waits does not: what is waited for may hang, in a driver or on a network's file system.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from functools import partial


class _State:
    held = False
    waiting = False


def take_interrupts() -> None:
    """Let SIGINT, unless it is ignored, and SIGTERM raise KeyboardInterrupt, at once or when they are no longer held."""
    _State.held = _State.waiting = False
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Let interrupts wait until the block ends; what is yielded lets them through in a block within: ``with let_through():``."""
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
