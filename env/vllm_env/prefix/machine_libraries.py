"""Pack shared libraries that an environment lacks and no wheel contains.

vLLM's libnuma.so.1 is one. They come from the Triton root that will serve, if it has its own: the
wheel nvidia-pytriton does, and every server links libnuma. Otherwise they come from this machine.
A copy differs from its original only in run path and name, so equal originals give equal bytes.
"""

import os
import platform
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base.elf import read_dynamic_section
from vllm_env.base.process import capture, run
from vllm_env.base.workspace import TOOLS

from .needed_libraries import DRIVER_LIBRARIES, SYSTEM_LIBRARIES, Need, NeededLibraries

# The folders of Debian and Ubuntu, and those of Red Hat, for a machine without ldconfig's cache.
_MULTIARCH = f"{platform.machine()}-linux-gnu"
STANDARD_FOLDERS = tuple(map(Path, (
    f"/lib/{_MULTIARCH}", f"/usr/lib/{_MULTIARCH}", "/lib64", "/usr/lib64", "/lib", "/usr/lib"
)))  # fmt: skip
# A line of ``ldconfig -p``: name, kind in brackets, path.
_LINE = re.compile(r"^\s*(\S+) \(([^)]*)\) => (/.*)$", re.MULTILINE)


@dataclass(frozen=True)
class AddedLibrary:
    """A library copied into an environment.

    Attributes:
        soname: the name by which other files need it.
        source: the file that was copied.
        glibc: the newest version of glibc's symbols that it needs, such as ``(2, 34)``.
    """

    soname: str
    source: Path
    glibc: tuple[int, ...]


def find_library(
    soname: str, vendored: Path | None = None, folders: tuple[Path, ...] = STANDARD_FOLDERS
) -> Path | None:
    """Return the file of a library for this machine's architecture; None if it is not found.

    Args:
        soname: the library's name.
        vendored: a Triton root's folder of libraries, which is searched first.
        folders: searched last, after ldconfig's cache.
    """
    # The driver's libraries must match the driver of the machine that serves, not of this one. A
    # name with a folder is not searched for.
    if soname in DRIVER_LIBRARIES or "/" in soname:
        return None
    candidates = []
    if vendored:
        # auditwheel has added a digest to the names there (libnuma-3582bce9.so.1.0.0).
        name, _, version = soname.partition(".so")
        renamed = re.compile(rf"{re.escape(name)}(-[0-9a-f]{{8}})?\.so{re.escape(version)}(\.\d+)*")
        files = sorted(vendored.glob(f"{name}*"))
        candidates += [file for file in files if renamed.fullmatch(file.name)]
    # ldconfig's cache is next, as for ld.so.
    for listed, kind, path in _LINE.findall(_cache_listing()):
        # A variant for newer processors stops with an illegal instruction on an older one.
        if listed == soname and "hwcap" not in kind:
            candidates.append(Path(path))
    candidates += [folder / soname for folder in folders]
    # A name may also lead to a linker script, or to a library for another architecture.
    return next((c for c in candidates if read_dynamic_section(c) is not None), None)


def _cache_listing() -> str:
    """Return the output of ``ldconfig -p``; an empty string if there is no ldconfig."""
    # Debian has it in /sbin, which is not in the PATH of an ordinary user.
    program = shutil.which("ldconfig", path="/sbin:/usr/sbin:/bin:/usr/bin")
    if program is None:
        return ""
    _, listing = capture([program, "-p"])
    return listing


def with_dependencies(
    sonames: Iterable[str],
    environment: Path,
    vendored: Path | None = None,
    folders: tuple[Path, ...] = STANDARD_FOLDERS,
) -> dict[str, Path]:
    """Return the files of libraries and of all their dependencies, by soname, sorted.

    Args:
        sonames: the libraries.
        environment: libraries in its ``lib`` are omitted.
        vendored: a Triton root's folder of libraries, which is searched first.
        folders: searched last, after ldconfig's cache.
    """
    files: dict[str, Path] = {}
    waiting = list(sonames)
    while waiting:
        soname = waiting.pop()
        if soname in files or soname in SYSTEM_LIBRARIES or (environment / "lib" / soname).exists():
            continue
        file = find_library(soname, vendored, folders)
        section = read_dynamic_section(file) if file else None
        # A library that this machine lacks, too, is skipped here. The check of the finished
        # environment names it.
        if file and section:
            files[soname] = file
            waiting += section.needed
    return dict(sorted(files.items()))


def add_libraries(
    libraries: dict[str, Path], environment: Path, needs: Iterable[Need] = ()
) -> tuple[AddedLibrary, ...]:
    """Copy libraries into the environment's ``lib``, and set the run paths by which they are found.

    Args:
        libraries: the files by the names that other files ask for, from :func:`with_dependencies`.
        environment: the folder that contains ``bin`` and ``lib``.
        needs: the files that need libraries; those that need other libraries are ignored.

    Raises:
        CommandError: patchelf cannot change a file.
    """
    # Run paths are necessary: LD_LIBRARY_PATH, which Triton sets for the stub, is not passed on to
    # vLLM's processes.
    folder = environment / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    copies = []
    for soname, file in libraries.items():
        target = folder / soname
        _patch(file, target, "--set-rpath", "$ORIGIN", "--set-soname", soname)
        section = read_dynamic_section(target)
        copies.append(AddedLibrary(soname, file, section.glibc if section else ()))
    for name in sorted({need.file for need in needs if need.library in libraries}):
        file = environment / name
        section = read_dynamic_section(file)
        # patchelf would otherwise convert a DT_RPATH to a DT_RUNPATH, which does not apply to the
        # dependencies of dependencies.
        keep_rpath = ["--force-rpath"] if section and section.rpath else []
        run_path = f"$ORIGIN/{os.path.relpath(folder, file.parent)}"
        _patch(file, file, *keep_rpath, "--add-rpath", run_path)
    return tuple(copies)


def _patch(source: Path, target: Path, *options: str) -> None:
    """Write a copy of a library, changed by patchelf with ``options``, to ``target``."""
    # Not in place: the target may be a hard link into uv's cache.
    temporary = target.with_name(f".{target.name}.new")
    shutil.copyfile(source, temporary)
    temporary.chmod(0o755)
    run([TOOLS / "patchelf", *options, temporary], what=f"set the library path of {target.name}")
    temporary.replace(target)


def newer_glibc(copies: Iterable[AddedLibrary], needs: NeededLibraries) -> tuple[AddedLibrary, ...]:
    """Return the added libraries that need a newer glibc than all other files of the environment.

    Args:
        copies: the copied libraries.
        needs: the needs of the environment before the copying.
    """
    # With such a library, the environment no longer starts on machines with an older glibc.
    return tuple(library for library in copies if library.glibc > needs.glibc)
