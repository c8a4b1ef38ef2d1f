"""Find paths of the build machine in an environment: they do not exist where it will run."""

import os
import re
import sys
from pathlib import Path

from vllm_env.base.elf import read_dynamic_section
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.workspace import CHECKOUT

_ELF = b"\x7fELF"
# Records of installed packages. Their paths are names of files and are not used as places.
_LEFT_OUT = ("RECORD", "SOURCES.txt")
# A byte in a component of a path.
_NAME = rb"[\w.~+-]"
# The kinds of short strings in bytecode, as CPython's marshal.c names them.
_SHORT = rb"[zZ\xfa\xda]"
# Compilers and linkers take a folder directly after these.
_FLAG = rb"(?<=\s-[IL])|(?<=[\"'=]-[IL])"
# Folders that many machines have. They are only compared with other names.
_TEMPORARY = "/tmp"  # noqa: S108
_SYSTEM = {"/", "/root", "/usr", "/usr/local", "/opt", "/home", "/work", "/workspace", _TEMPORARY}
# In a home, tools keep downloaded and built files there.
_HIDDEN = (".cache", ".config", ".local")
# Homes that examples in third-party sources name.
_EXAMPLES = re.compile(r"/home/(me|you|user|username|ubuntu|runner|vscode|jovyan|ec2-user|app)")


def build_places(root: Path) -> tuple[str, ...]:
    """Return the folders that a build on this machine uses.

    They are the cache ``root``, the tools, the interpreter, the checkout, and hidden folders in
    the home.
    """
    home = str(Path.home())
    pyenv = os.environ.get("PYENV_ROOT") or f"{home}/.pyenv"
    folders = {str(path) for path in (root, sys.prefix, sys.base_prefix, pyenv, CHECKOUT)}
    # The home itself is left out: third-party sources name /root or /home/alex in examples. If it
    # is one of those that they often name, its hidden folders are left out, too.
    if home not in _SYSTEM and not _EXAMPLES.fullmatch(home):
        folders |= {f"{home}/{name}" for name in _HIDDEN}
    folders -= _SYSTEM
    places: list[str] = []
    for folder in sorted(folders):
        # The folder above is found in every path that has this one.
        if any(folder.startswith(f"{other}/") for other in folders):
            continue
        # Sources also name short paths such as /src. So the entries of such a folder count.
        if folder.count("/") > 1:
            places.append(folder)
        else:
            places += map(str, sorted(Path(folder).glob("*")))
    return tuple(places)


def find_leaks(environment: Path, places: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the files of an environment that contain one of the places, and that place.

    The paths of the files are relative to the environment.
    """
    patterns = {place: (_in_text(place), _in_bytecode(place)) for place in places}
    leaks = []
    for folder, _, files in os.walk(environment):
        for name in files:
            # A string, not a Path, which is slower for 50,000 files.
            file = f"{folder}/{name}"
            if name in _LEFT_OUT or os.path.islink(file):  # noqa: PTH114
                continue
            data = _searched_bytes(file)
            for place, (in_text, in_bytecode) in patterns.items():
                # Most files contain no place, and a plain search is faster than a pattern.
                if place.encode() not in data:
                    continue
                if in_text.search(data) or (name.endswith(".pyc") and in_bytecode.search(data)):
                    leaks.append((file.removeprefix(f"{environment}/"), place))
                    break
    return leaks


def _searched_bytes(file: str) -> bytes:
    """Return the bytes in which a place counts: a library's run path, any other file's content."""
    # libpython contains the folder of its build as a fallback that is never reached.
    with open(file, "rb") as stream:
        head = stream.read(len(_ELF))
        if head != _ELF:
            return head + stream.read()
    section = read_dynamic_section(file)
    # A file that needs no library has no use for its run path.
    if section is None or not section.needed:
        return b""
    return "\n".join((*section.rpath, *section.runpath)).encode()


def _in_text(place: str) -> re.Pattern[bytes]:
    """Return a pattern for a place as whole components.

    ``/src`` is found in ``-I/src/include``, not in ``/usr/src``.
    """
    start = rb"(?:(?<!%b)|%b)" % (_NAME, _FLAG)
    end = rb"(?!%b*\w)" % _NAME
    return re.compile(start + re.escape(place.encode()) + end)


def _in_bytecode(place: str) -> re.Pattern[bytes]:
    """Return a pattern for a place at the beginning of a marshalled string.

    Such a string follows its length in four bytes, or one of the letters of ``_SHORT`` and its
    length in one byte. The byte may look like a letter, so the pattern of ``_in_text`` fails.
    """
    text = place.encode()
    # 1) The place is the whole string. Then any byte may follow it.
    whole = re.escape(len(text).to_bytes(4, "little") + text)
    if len(text) < 256:
        whole += rb"|%b%b" % (_SHORT, re.escape(bytes([len(text)]) + text))
    # 2) The place is the beginning of a short string.
    beginning = rb"%b.%b(?!%b*\w)" % (_SHORT, re.escape(text), _NAME)
    return re.compile(rb"%b|%b" % (beginning, whole), re.DOTALL)


def check_leaks(environment: Path, places: tuple[str, ...]) -> None:
    """Check that an environment contains no path of its build.

    Raises:
        VllmEnvError: it contains one; the message names the first files.
    """
    leaks = find_leaks(environment, places)
    if leaks:
        files = ", ".join(f"{file} ({place})" for file, place in leaks[:3])
        more = f" and {len(leaks) - 3} more" if len(leaks) > 3 else ""
        raise VllmEnvError(
            f"The environment names folders of the machine that it was built on: {files}{more}.",
            cause="They do not exist where it will run, or hold other files there.",
            remedy=(
                "Report the package that wrote it. "
                "To build without it, omit it or pin another version of it."
            ),
        )
