"""A first start reads its files from the disk: what the kernel keeps of them in memory is dropped where that is permitted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_CONTROL = Path("/proc/sys/vm/drop_caches")


def drop(places: Iterable[Path], control: Path = _CONTROL) -> str:
    """Drop the page cache; return how, for the report.

    The whole machine's where this user may, which takes root and, in a container, a writable /proc/sys; else that of the
    files below `places`, which any user may ask for and the kernel does for pages that nobody else uses.
    """
    os.sync()  # only what is written can be dropped
    try:
        control.write_text("3\n", encoding="ascii")
    except OSError as error:
        return f"dropped for {_advise(places)} files one by one ({control.name}: {error.strerror})"
    return "dropped, the whole machine's"


def _advise(places: Iterable[Path]) -> int:
    count = 0
    for place in places:
        for file in [place] if place.is_file() else place.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                count += 1
    return count
