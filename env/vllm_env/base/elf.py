"""Read from ELF files the fields that ld.so uses: library names, search paths, symbol versions."""

import functools
import os
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

# The header of an ELF file begins with class (64 bits) and byte order (little-endian): gABI 4.1.
_IDENT = b"\x7fELF\x02\x01"
# The machine is compared because code for GPUs is in ELF files, too. Files are made and read on
# machines of one kind: AArch64 has 183, x86-64 has 62.
_MACHINE = (183 if platform.machine() == "aarch64" else 62).to_bytes(2, "little")
# Nine tenths of an environment's files have these endings, and no ELF file has one of them.
# To open these 50,000 files would take longer than everything else here.
NEVER_ELF = (
    ".py",
    ".pyc",
    ".pyi",
    ".h",
    ".hpp",
    ".cuh",
    ".hxx",
    ".json",
    ".txt",
    ".md",
    ".cu",
    ".pxd",
    ".pyx",
)
# pyelftools raises these for a damaged file.
_DAMAGED = (ELFError, ValueError, KeyError, AttributeError)
_GLIBC = re.compile(r"GLIBC_(\d+(?:\.\d+)*)")
_LIBPYTHON = re.compile(r"libpython(3\.\d+)")


@dataclass(frozen=True)
class DynamicSection:
    """The fields of a dynamic section that ld.so uses.

    Attributes:
        needed: names of the libraries that the file needs.
        rpath: folders of DT_RPATH as written, with ``$ORIGIN``.
        runpath: folders of DT_RUNPATH as written, with ``$ORIGIN``.
        glibc: the newest version of glibc that the file needs, such as ``(2, 34)``, or ``()``.
    """

    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]
    glibc: tuple[int, ...] = ()


def walk(folder: str) -> Iterator[tuple[str, bool]]:
    """Yield each file below a folder that may be an ELF file, and whether it is a symbolic link.

    Links to folders are neither followed nor yielded.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from walk(entry.path)
            elif entry.is_symlink():
                # A link to a folder would make its files appear twice.
                if not entry.is_dir():
                    yield entry.path, True
            elif entry.is_file() and not entry.name.endswith(NEVER_ELF):
                yield entry.path, False


def read_dynamic_section(path: str | Path) -> DynamicSection | None:
    """Return the dynamic section of a program or library for this kind of machine.

    None for any other file, and for one that is missing or damaged. An unchanged file is read once.
    """
    try:
        status = os.stat(path)  # noqa: PTH116
        times = (status.st_mtime_ns, status.st_ctime_ns)
        return _read_once(str(path), (status.st_dev, status.st_ino, status.st_size, *times))
    except OSError:
        return None


# A build reads 500 libraries for what they need, and again for their paths. pyelftools takes 0.6 s.
@functools.cache
def _read_once(path: str, _version: tuple[int, ...]) -> DynamicSection | None:
    """Return what ``read_dynamic_section`` does, from memory if the file has been read before.

    ``_version`` identifies the file's content. As an argument, it is a part of the memory's key.
    """
    try:
        with open(path, "rb") as stream:
            # Bytes 18 and 19 are the machine.
            head = stream.read(20)
            if head[:6] != _IDENT or head[18:] != _MACHINE:
                return None
            # ld.so reads segments. It also loads a file whose section headers were cut off.
            elf = ELFFile(stream)
            for segment in elf.iter_segments("PT_DYNAMIC"):
                return _read(elf, segment)
            return None
    except _DAMAGED:
        return None


def needed_python(path: Path) -> str | None:
    """Return the Python version (``3.11``) whose libpython an ELF file needs; None without one."""
    section = read_dynamic_section(path)
    for library in section.needed if section else ():
        if match := _LIBPYTHON.match(library):
            return match[1]
    return None


def _read(elf: ELFFile, segment: Any) -> DynamicSection:
    """Return the fields of a dynamic segment (PT_DYNAMIC)."""
    tags = list(segment.iter_tags())
    # Both kinds of paths stay apart: a library's dependencies inherit DT_RPATH, not DT_RUNPATH.
    return DynamicSection(
        needed=tuple(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"),
        rpath=_folders(tag.rpath for tag in tags if tag.entry.d_tag == "DT_RPATH"),
        runpath=_folders(tag.runpath for tag in tags if tag.entry.d_tag == "DT_RUNPATH"),
        glibc=_newest_glibc(elf),
    )


def _folders(entries: Iterable[str]) -> tuple[str, ...]:
    """Split search paths such as ``/a:/b`` into folders."""
    return tuple(folder for entry in entries for folder in entry.split(":") if folder)


def _newest_glibc(elf: ELFFile) -> tuple[int, ...]:
    """Return the newest version of glibc's symbols that a file needs; ``()`` if it needs none."""
    newest: tuple[int, ...] = ()
    for section in elf.iter_sections("SHT_GNU_verneed"):
        for _, auxiliaries in section.iter_versions():
            for auxiliary in auxiliaries:
                # GLIBC_PRIVATE has no number. As numbers, 2.9 is older than 2.34.
                if match := _GLIBC.fullmatch(auxiliary.name):
                    newest = max(newest, tuple(map(int, match[1].split("."))))
    return newest
