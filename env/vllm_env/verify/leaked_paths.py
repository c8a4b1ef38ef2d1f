"""Finds what a build left of its own folders in an environment: they do not exist where it will run."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from vllm_env.base.elf import read_dynamic_section
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.workspace import CHECKOUT

_ELF = b"\x7fELF"
# Read at run time or by nothing at all: the records of what was installed name files, not places.
_LEFT_OUT = ("RECORD", "SOURCES.txt")
_NAME = rb"[\w.~+-]"  # a byte of a component of a path
_FLAG = rb"(?<=\s-[IL])|(?<=[\"'=]-[IL])"  # compilers and linkers take a folder right after these
_SYSTEM = ("/", "/root", "/usr", "/usr/local", "/opt", "/home", "/tmp", "/work", "/workspace")  # noqa: S108 - names only
_HIDDEN = (".cache", ".config", ".local")  # where tools keep what they fetch and build
_EXAMPLES = re.compile(r"/home/(me|you|user|username|ubuntu|runner|vscode|jovyan|ec2-user|app)")


def build_places(root: Path) -> tuple[str, ...]:
    """Return the folders that a build on this machine uses: the cache, the tools, the interpreter's, the checkout, home's.

    A folder that many machines have is left out, as is home itself: third-party sources name ``/root`` or ``/home/alex`` in
    their examples. So they do with a name as short as ``/src``: what lies in such a folder stands for it.
    """
    pyenv, home = os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", str(Path.home())
    hidden = [] if home in _SYSTEM or _EXAMPLES.fullmatch(home) else [f"{home}/{name}" for name in _HIDDEN]
    own = sorted({str(p) for p in (root, sys.prefix, sys.base_prefix, pyenv, CHECKOUT, *hidden)} - {*_SYSTEM})
    outer = [p for p in own if not any(p.startswith(f"{other}/") for other in own)]
    return tuple(q for p in outer for q in ([p] if p.count("/") > 1 else map(str, sorted(Path(p).glob("*")))))


def find_leaks(environment: Path, places: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the files of an environment that name one of the places, and the place; paths are relative to it.

    Text files and bytecode are searched as a whole, libraries and programs in their run path only: libpython keeps where it
    was built as a fallback that is never reached.
    """
    needles = {place: (_named(place), _named_in_bytecode(place)) for place in places}
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


def _named(place: str) -> re.Pattern[bytes]:
    """Return what finds a place as whole components: ``/src`` is in ``-I/src/include`` and not in ``/usr/src`` or ``/srcs``."""
    return re.compile(rb"(?:(?<!%b)|%b)%b(?!%b*\w)" % (_NAME, _FLAG, re.escape(place.encode()), _NAME))


def _named_in_bytecode(place: str) -> re.Pattern[bytes]:
    """Return what finds a place at the begin of a marshalled string, whose length stands right before it in one byte or four.

    That byte may be any letter; and where the place is the whole string, so may be what follows it.
    """
    text = place.encode()
    whole = re.escape(len(text).to_bytes(4, "little")) + re.escape(text)
    if len(text) < 256:
        whole += rb"|[zZ\xfa\xda]%b" % re.escape(bytes([len(text)]) + text)
    return re.compile(rb"[zZ\xfa\xda].%b(?!%b*\w)|%b" % (re.escape(text), _NAME, whole), re.DOTALL)


def _place_in(file: Path, needles: Mapping[str, tuple[re.Pattern[bytes], re.Pattern[bytes]]]) -> str | None:
    with file.open("rb") as stream:
        head = stream.read(len(_ELF))
        data = b"" if head == _ELF else head + stream.read()
    if head == _ELF:
        needs = read_dynamic_section(file)
        # without a library to look for, nothing reads the run path
        data = "\n".join((*needs.rpath, *needs.runpath)).encode() if needs and needs.needed else b""
    for place, patterns in needles.items():
        if place.encode() in data and any(p.search(data) for p in patterns[: 1 + (file.suffix == ".pyc")]):
            return place
    return None


def check_leaks(environment: Path, places: tuple[str, ...]) -> None:
    """Refuse an environment that names a folder of its build; the VllmEnvError names the first files."""
    found = find_leaks(environment, places)
    if found:
        listed = ", ".join(f"{file} ({place})" for file, place in found[:3])
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise VllmEnvError(
            f"The environment names folders of the machine that it was built on: {listed}{more}.",
            cause="They do not exist where it will run, or hold other files there.",
            remedy="Report the package that wrote it; to build without it, omit it or pin another version of it.",
        )
