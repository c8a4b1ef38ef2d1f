"""The dynamic section of ELF files as ld.so reads it: names, search paths, and the symbol versions that are asked for."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

if TYPE_CHECKING:
    from collections.abc import Iterator

# The machine field of the header (System V gABI 4.1): code of a GPU or of another architecture is in ELF files too.
_MACHINES = {"x86_64": 62, "aarch64": 183}
# Nine tenths of an environment; no ELF file has such a name, and to open 50,000 files takes longer than all the rest.
_NEVER_ELF = (".py", ".pyc", ".pyi", ".h", ".hpp", ".cuh", ".hxx", ".json", ".txt", ".md", ".cu", ".pxd", ".pyx")


@dataclass(frozen=True)
class DynamicSection:
    """What ld.so goes by; the paths are as written, with ``$ORIGIN``.

    ``glibc`` and ``glibcxx`` are the newest versions of symbols of the C and the C++ library, such as ``(2, 34)``, or ().
    """

    soname: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]
    glibc: tuple[int, ...] = ()
    glibcxx: tuple[int, ...] = ()


def walk(folder: str) -> Iterator[tuple[str, bool]]:
    """Yield each file of a folder and of those in it that may be an ELF file, and whether it is a symbolic link.

    Links to folders are not followed; they are not yielded either.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from walk(entry.path)
            elif entry.is_symlink():
                if not entry.is_dir():
                    yield entry.path, True
            elif entry.is_file() and not entry.name.endswith(_NEVER_ELF):
                yield entry.path, False


def read_dynamic_section(path: str) -> DynamicSection | None:
    """Return the dynamic section of a program or library of this machine's architecture, or None for any other file."""
    try:
        with open(path, "rb") as stream:
            if not _is_for_this_machine(stream.read(20)):
                return None
            elf = ELFFile(stream)
            segment = next((s for s in elf.iter_segments() if isinstance(s, DynamicSegment)), None)
            return _read(elf, segment) if segment is not None else None
    except (ELFError, OSError, ValueError, KeyError, AttributeError):  # what pyelftools makes of a damaged file
        return None


def _is_for_this_machine(head: bytes) -> bool:
    if head[:6] != b"\x7fELF\x02\x01" or len(head) < 20:  # 64 bits, little-endian
        return False
    return int.from_bytes(head[18:20], "little") == _MACHINES.get(platform.machine())


def _read(elf: ELFFile, segment: DynamicSegment) -> DynamicSection:
    names: dict[str, list[str]] = {"DT_NEEDED": [], "DT_RPATH": [], "DT_RUNPATH": [], "DT_SONAME": []}
    attributes = {"DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath", "DT_SONAME": "soname"}
    for tag in segment.iter_tags():
        if tag.entry.d_tag in names:
            names[tag.entry.d_tag].append(getattr(tag, attributes[tag.entry.d_tag]))
    versions = _asked_versions(elf)
    return DynamicSection(
        soname="".join(names["DT_SONAME"][:1]),
        needed=tuple(names["DT_NEEDED"]),
        rpath=_split(names["DT_RPATH"]),
        runpath=_split(names["DT_RUNPATH"]),
        glibc=_newest(versions, "GLIBC_"),
        glibcxx=_newest(versions, "GLIBCXX_"),
    )


def _split(entries: list[str]) -> tuple[str, ...]:
    return tuple(folder for entry in entries for folder in entry.split(":") if folder)


def _asked_versions(elf: ELFFile) -> list[str]:
    section = next((s for s in elf.iter_sections() if isinstance(s, GNUVerNeedSection)), None)
    return [aux.name for _, auxes in section.iter_versions() for aux in auxes] if section is not None else []


def _newest(versions: list[str], prefix: str) -> tuple[int, ...]:
    numbers = (re.fullmatch(rf"{prefix}(\d+(?:\.\d+)*)", version) for version in versions)
    return max((tuple(int(n) for n in match[1].split(".")) for match in numbers if match), default=())
