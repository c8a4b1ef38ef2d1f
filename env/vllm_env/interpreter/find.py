"""Find an interpreter of this machine that can be packed, if the machine cannot reach conda-forge.

It must have a shared libpython, because the stub embeds it. The interpreters of Debian and Ubuntu
are used only if there is no other one. They have to be changed (``debian.py``), and their libpython
is slow: the same loop needs 1.3 (Debian 12) and 2.2 (Ubuntu 24.04) times the CPU of their program.
"""

import json
import os
import shutil
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.machine import this_platform
from vllm_env.base.process import capture

from . import debian

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


@dataclass(frozen=True)
class Interpreter:
    """A CPython of this machine with a shared libpython."""

    version: str
    """The full version, such as ``3.11.7``."""
    executable: Path
    prefix: Path
    stdlib: Path
    library: Path
    """The shared libpython, such as ``…/libpython3.11.so.1.0``."""

    @property
    def minor(self) -> str:
        """Return the version in the names of its folders, such as ``3.11``."""
        return ".".join(self.version.split(".")[:2])

    @property
    def is_debian(self) -> bool:
        """Return whether it is the interpreter of Debian or Ubuntu."""
        return debian.is_debian(self.stdlib)

    @property
    def headers(self) -> Path | None:
        """Return the folder with ``Python.h``, or None if it is missing."""
        # torch.compile needs it. On Debian and Ubuntu it is in libpython3.11-dev.
        folder = self.prefix / "include" / f"python{self.minor}"
        return folder if (folder / "Python.h").is_file() else None


def find_interpreter(python: str) -> Interpreter:
    """Return an interpreter of this machine with version ``python`` (such as ``3.11``).

    Raises:
        VllmEnvError: no interpreter has a shared libpython, or no environment is made here.
    """
    # Fails on a machine for which no environment is made.
    this_platform()
    reasons = []
    seen = set()
    last_choice = None
    for candidate in _candidates(python):
        # None also in a folder that this user may not read, where is_file() would fail.
        if shutil.which(candidate) is None:
            continue
        program = candidate.resolve()
        # Several names may lead to one program.
        if program in seen:
            continue
        seen.add(program)
        # A string is the reason against this one.
        result = _probe(candidate, python)
        if isinstance(result, str):
            reasons.append(f"{candidate} ({result})")
        elif result.is_debian:
            # Only the last choice: any other interpreter needs no change.
            last_choice = last_choice or result
        else:
            return result
    if last_choice:
        return last_choice
    command = _library_command(python)
    # Debian's interpreter is there and lacks only the library.
    if any(command in reason for reason in reasons):
        remedy = f"Run {command}"
    else:
        packages = f"python{python} libpython{python}"
        remedy = f"Install one (apt-get install {packages}, or pyenv with --enable-shared)"
    raise VllmEnvError(
        f"There is no Python {python} to pack: conda-forge does not answer and this machine has "
        "none with a shared libpython.",
        cause=f"Looked at: {', '.join(reasons) or 'PATH, pyenv and /usr'}.",
        remedy=f"{remedy}, give access to conda-forge, or pick another with --python.",
    )


def _library_command(python: str) -> str:
    """Return the command that installs the shared libpython of Debian or Ubuntu."""
    # In 24.04 the package is libpython3.12t64, which provides this name, too.
    return f"apt-get install libpython{python}"


def _candidates(python: str) -> list[Path]:
    """Return where an interpreter of version ``python`` may be, the preferred places first."""
    name = f"python{python}"
    candidates = []
    if sysconfig.get_python_version() == python:
        candidates.append(Path(sys.executable))
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    # It may be another user's folder, as after `sudo -E`.
    with suppress(PermissionError):
        candidates += sorted(pyenv.glob(f"versions/{python}.*/bin/{name}"), reverse=True)
    folders = os.environ.get("PATH", "").split(os.pathsep)
    # pyenv's shims are skipped: they start another program than their path names.
    candidates += [Path(folder, name) for folder in folders if folder and "/shims" not in folder]
    return [*candidates, Path("/usr/local/bin", name), Path("/usr/bin", name)]


def _probe(candidate: Path, python: str) -> Interpreter | str:
    """Return the interpreter behind a program, or the reason why it cannot be packed."""
    try:
        status, output = capture([candidate, "-I", "-c", _PROBE])
    except CommandError:
        status = 1
    if status != 0:
        return "does not start"
    found = json.loads(output.splitlines()[-1])
    if found["implementation"] != "cpython" or not found["version"].startswith(python + "."):
        return f"is {found['implementation']} {found['version']}"
    stdlib = Path(found["stdlib"])
    # Debian has libpython in /usr/lib/x86_64-linux-gnu.
    folders = [*found["folders"], f"/usr/lib/{found['multiarch']}"]
    files = [Path(folder, found["library"]) for folder in folders]
    library = next((file for file in files if file.is_file()), None)
    # A Python without a shared library names its static one, libpython3.11.a.
    if library is None or ".so" not in library.name:
        command = f": {_library_command(python)}" if debian.is_debian(stdlib) else ""
        return f"has no shared libpython{command}"
    return Interpreter(
        version=found["version"],
        executable=Path(found["executable"]),
        prefix=Path(found["prefix"]),
        stdlib=stdlib,
        library=library,
    )
