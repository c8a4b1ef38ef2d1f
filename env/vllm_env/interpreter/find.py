"""Find an interpreter of this machine that can be packed, if the machine cannot reach conda-forge.

It must have a shared libpython, because the stub embeds it. The interpreters of Debian and Ubuntu are used only if there is
no other one; see ``debian.py``.
"""

import json
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.machine import require_x86_64
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
    """A CPython of this machine with a shared libpython; ``version`` is the full version, such as ``3.11.7``."""

    version: str
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
        """Return the folder with ``Python.h``; None if torch.compile would lack it (install libpython3.11-dev)."""
        folder = self.prefix / "include" / f"python{self.minor}"
        return folder if (folder / "Python.h").is_file() else None


def find_interpreter(python: str) -> Interpreter:
    """Return an interpreter of this machine with version ``python`` (``3.11``); Debian's or Ubuntu's only as a last choice.

    Raises:
        VllmEnvError: no interpreter has a shared libpython, or this machine is not an x86_64.
    """
    require_x86_64()
    rejected, seen = [], set()
    own = None
    for candidate in _candidates(python):
        real = candidate.resolve()
        # Several names may lead to one interpreter.
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
    """Return the command that installs Debian's or Ubuntu's shared libpython; 24.04's libpython3.12t64 provides it, too."""
    return f"apt-get install libpython{python}"


# Shims of pyenv are skipped: they start another program than their path names.
def _candidates(python: str) -> list[Path]:
    name = f"python{python}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    places = [
        Path(p) for p in os.environ.get("PATH", "").split(os.pathsep) if p and "/shims" not in p
    ]
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
    library = next(
        (f / facts["library"] for f in folders if (f / facts["library"]).is_file()), None
    )
    if library is None or ".so" not in library.name:
        help_ = f": {_library_command(python)}" if debian.is_debian(stdlib) else ""
        return f"has no shared libpython{help_}"
    return Interpreter(
        facts["version"], Path(facts["executable"]), Path(facts["prefix"]), stdlib, library
    )
