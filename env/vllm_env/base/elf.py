"""What an ELF file asks for, read with pyelftools: libraries, symbol versions, search paths."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection, GNUVerNeedSection
from packaging.version import Version

_LIBPYTHON = re.compile(r"libpython(3\.\d+)")


@dataclass(frozen=True)
class ElfNeeds:
    """The dynamic section of an ELF file: NEEDED, RPATH or RUNPATH, and the versions it asks for, per library."""

    libraries: tuple[str, ...]
    run_paths: tuple[str, ...]
    versions: dict[str, tuple[str, ...]]


def read_needs(path: Path) -> ElfNeeds | None:
    """Return what an ELF file needs, or None for a file that is not a dynamic ELF file."""
    try:
        with path.open("rb") as stream:
            elf = ELFFile(stream)
            dynamic = _section(elf, DynamicSection)
            if dynamic is None:
                return None
            tags = list(dynamic.iter_tags())
            libraries = tuple(t.needed for t in tags if t.entry.d_tag == "DT_NEEDED")
            paths = [t.rpath for t in tags if t.entry.d_tag == "DT_RPATH"]
            paths += [t.runpath for t in tags if t.entry.d_tag == "DT_RUNPATH"]
            run_paths = tuple(p for entry in paths for p in entry.split(":") if p)
            return ElfNeeds(libraries, run_paths, _versions(elf))
    except (ELFError, OSError):
        return None


def _section(elf: ELFFile, kind: type[Any]) -> Any:
    return next((section for section in elf.iter_sections() if isinstance(section, kind)), None)


def _versions(elf: ELFFile) -> dict[str, tuple[str, ...]]:
    section = _section(elf, GNUVerNeedSection)
    return {need.name: tuple(aux.name for aux in auxes) for need, auxes in section.iter_versions()} if section else {}


def needed_python(path: Path) -> str | None:
    """Return the Python version (``3.11``) whose libpython an ELF file needs, or None."""
    needs = read_needs(path)
    for library in needs.libraries if needs else ():
        match = _LIBPYTHON.match(library)
        if match:
            return match.group(1)
    return None


def newest_version(needs: ElfNeeds, prefix: str) -> tuple[int, ...]:
    """Return the newest symbol version with ``prefix`` (``GLIBC_``, ``GLIBCXX_``), as numbers; () for none."""
    return _newest((name for names in needs.versions.values() for name in names), prefix)


def newest_defined(library: Path, prefix: str) -> tuple[int, ...]:
    """Return the newest symbol version with ``prefix`` that a library defines, as numbers; () for none."""
    try:
        with library.open("rb") as stream:
            section = _section(ELFFile(stream), GNUVerDefSection)
            return _newest([aux.name for _, auxes in section.iter_versions() for aux in auxes] if section else (), prefix)
    except (ELFError, OSError):
        return ()


def _newest(names: Iterable[str], prefix: str) -> tuple[int, ...]:
    numbers = (name.removeprefix(prefix) for name in names if re.fullmatch(rf"{prefix}[\d.]+", name))
    return max((Version(number).release for number in numbers), default=())
