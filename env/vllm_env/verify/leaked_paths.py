"""Find paths of the build machine in an environment: they do not exist where the environment will run."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from vllm_env.base.elf import read_dynamic_section
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.workspace import CHECKOUT

_ELF = b"\x7fELF"
# Records of installed packages. Their paths are names of files and are not used as places.
_LEFT_OUT = ("RECORD", "SOURCES.txt")
_NAME = rb"[\w.~+-]"  # a byte in a component of a path
_FLAG = (
    rb"(?<=\s-[IL])|(?<=[\"'=]-[IL])"  # compilers and linkers take a folder directly after these
)
_SYSTEM = ("/", "/root", "/usr", "/usr/local", "/opt", "/home", "/tmp", "/work", "/workspace")  # noqa: S108 - names only
_HIDDEN = (".cache", ".config", ".local")  # in a home; tools keep fetched and built files there
# Homes that examples in third-party sources name.
_EXAMPLES = re.compile(r"/home/(me|you|user|username|ubuntu|runner|vscode|jovyan|ec2-user|app)")


def build_places(root: Path) -> tuple[str, ...]:
    """Return the folders that a build on this machine uses: cache, tools, interpreter, checkout and hidden folders in the home.

    Folders that many machines have are left out, and the home itself, too: third-party sources name ``/root`` or ``/home/alex``
    in examples. They also name short paths such as ``/src``; for such a folder, its content is returned.
    """
    pyenv, home = os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", str(Path.home())
    hidden = (
        []
        if home in _SYSTEM or _EXAMPLES.fullmatch(home)
        else [f"{home}/{name}" for name in _HIDDEN]
    )
    own = sorted(
        {str(p) for p in (root, sys.prefix, sys.base_prefix, pyenv, CHECKOUT, *hidden)} - {*_SYSTEM}
    )
    outer = [p for p in own if not any(p.startswith(f"{other}/") for other in own)]
    return tuple(
        q for p in outer for q in ([p] if p.count("/") > 1 else map(str, sorted(Path(p).glob("*"))))
    )


def find_leaks(environment: Path, places: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the files of an environment that contain one of the places, with the place; paths are relative to it.

    Text files and bytecode are searched completely. In libraries and programs only the run path is searched: libpython contains
    the folder of its build as a fallback that is never reached.
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
    """Return a pattern for a place as whole components: ``/src`` is found in ``-I/src/include``, not in ``/usr/src``."""
    return re.compile(
        rb"(?:(?<!%b)|%b)%b(?!%b*\w)" % (_NAME, _FLAG, re.escape(place.encode()), _NAME)
    )


def _named_in_bytecode(place: str) -> re.Pattern[bytes]:
    """Return a pattern for a place at the beginning of a marshalled string, which follows its length in one or four bytes.

    The length byte may be any letter. If the place is the whole string, any byte may follow it.
    """
    text = place.encode()
    whole = re.escape(len(text).to_bytes(4, "little")) + re.escape(text)
    if len(text) < 256:
        whole += rb"|[zZ\xfa\xda]%b" % re.escape(bytes([len(text)]) + text)
    return re.compile(rb"[zZ\xfa\xda].%b(?!%b*\w)|%b" % (re.escape(text), _NAME, whole), re.DOTALL)


def _place_in(
    file: Path, needles: Mapping[str, tuple[re.Pattern[bytes], re.Pattern[bytes]]]
) -> str | None:
    with file.open("rb") as stream:
        head = stream.read(len(_ELF))
        data = b"" if head == _ELF else head + stream.read()
    if head == _ELF:
        needs = read_dynamic_section(file)
        # A file that needs no library has no use for its run path.
        data = "\n".join((*needs.rpath, *needs.runpath)).encode() if needs and needs.needed else b""
    for place, patterns in needles.items():
        if place.encode() in data and any(
            p.search(data) for p in patterns[: 1 + (file.suffix == ".pyc")]
        ):
            return place
    return None


def check_leaks(environment: Path, places: tuple[str, ...]) -> None:
    """Raise a VllmEnvError that names the first files if an environment contains a path of its build."""
    found = find_leaks(environment, places)
    if found:
        listed = ", ".join(f"{file} ({place})" for file, place in found[:3])
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise VllmEnvError(
            f"The environment names folders of the machine that it was built on: {listed}{more}.",
            cause="They do not exist where it will run, or hold other files there.",
            remedy="Report the package that wrote it; to build without it, omit it or pin another version of it.",
        )
