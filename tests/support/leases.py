"""Hold back the programs that open a file, by a lease on it (fcntl(2))."""

from __future__ import annotations

import fcntl
import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def held_back(file: Path) -> Iterator[None]:
    """Have every program that opens a file wait in its call until the block ends.

    The kernel lets it go on after 45 s (/proc/sys/fs/lease-break-time). Skips the test where there are no leases.
    """
    handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # By default the holder gets SIGIO, which would end this process.
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
        try:
            fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            pytest.skip(f"no leases here: {error}")
        yield
    finally:
        os.close(handle)
