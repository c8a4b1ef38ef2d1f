"""Finds what a build left of its own folders in an environment: they do not exist where it will run."""

import os
import re
import sys
from pathlib import Path

from vllm_env.base.elf import read_needs
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.workspace import CHECKOUT

_ELF = b"\x7fELF"
# Read at run time or by nothing at all: the records of what was installed name files, not places.
_LEFT_OUT = ("RECORD", "SOURCES.txt")
_SYSTEM = ("/", "/root", "/usr", "/usr/local", "/opt", "/home", "/tmp", "/work", "/workspace")  # noqa: S108 - names only
_EXAMPLES = re.compile(r"/home/(me|you|user|username|ubuntu|runner|vscode|jovyan|ec2-user|app)")


def build_places(root: Path) -> tuple[str, ...]:
    """Return the folders that a build on this machine uses: the cache, the tools, the interpreter's, the checkout, home.

    A folder that many machines have is left out: third-party sources name ``/root`` or ``/home/user`` in their examples.
    """
    pyenv = os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv"
    places = {str(p) for p in (root, sys.prefix, sys.base_prefix, pyenv, CHECKOUT, Path.home())}
    own = sorted(p for p in places if p not in _SYSTEM and not _EXAMPLES.fullmatch(p))
    return tuple(p for p in own if not any(p.startswith(f"{other}/") for other in own))


def find_leaks(environment: Path, places: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the files of an environment that name one of the places, and the place; paths are relative to it.

    Text files and bytecode are searched as a whole, libraries and programs in their run path only: libpython keeps where it
    was built as a fallback that is never reached.
    """
    needles = [place.encode() for place in places]
    found = []
    for folder, _, files in os.walk(environment):
        for name in files:
            file = Path(folder, name)
            if name in _LEFT_OUT or file.is_symlink():
                continue
            place = _place_in(file, needles)
            if place:
                found.append((str(file.relative_to(environment)), place))
    return found


def _place_in(file: Path, needles: list[bytes]) -> str | None:
    with file.open("rb") as stream:
        head = stream.read(len(_ELF))
        data = b"" if head == _ELF else head + stream.read()
    if head == _ELF:
        needs = read_needs(file)
        # without a library to look for, nothing reads the run path
        data = "\n".join(needs.run_paths).encode() if needs and needs.libraries else b""
    return next((n.decode() for n in needles if n in data), None)


def check_leaks(environment: Path, places: tuple[str, ...]) -> None:
    """Refuse an environment that names a folder of its build.

    Raises:
        VllmEnvError: naming the first files.
    """
    found = find_leaks(environment, places)
    if found:
        listed = ", ".join(f"{file} ({place})" for file, place in found[:3])
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise VllmEnvError(
            f"The environment names folders of the machine that it was built on: {listed}{more}.",
            cause="They do not exist where it will run, or hold other files there.",
            remedy="Report the package that wrote it; to build without it, omit it or pin another version of it.",
        )
