"""Make the packager's own virtual environment, once per lock and interpreter; then run the packager in it.

This file uses only the standard library. The environment is in the checkout's ``.tools/venv-X.Y-KEY``, or below the cache if
the checkout cannot be written. Its ``.stamp`` is written last. A packager that runs in it holds a shared lock on its folder.

    bootstrap.py ARGUMENT…                      the packager's command line, as gen_vllm_env.sh has it
    bootstrap.py --environment FOLDER LOCK      only make an environment, for tests/run.sh
"""

import argparse
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import time
from pathlib import Path
from typing import NoReturn

from vllm_env.base.cache import cache_root, settle_home
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.filesystem import give, give_tree, is_writable, owner_of
from vllm_env.base.locks import locked, remove_unlocked, take_lock
from vllm_env.base.machine import require_x86_64
from vllm_env.base.network import Network
from vllm_env.base.process import run
from vllm_env.cli.parser import parse

ENV = Path(__file__).resolve().parent
TOOLS = ENV.parent / ".tools"
LOCK = ENV / "requirements.txt"
VERSION = platform.python_version()
PYTHON = ".".join(VERSION.split(".")[:2])
# Settings of pip that would install to another place, or nothing.
ASTRAY = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_DRY_RUN", "PIP_PYTHON", "PIP_CONSTRAINT")
# ``python -m`` would put the current folder first in sys.path; the option against that (-P) is newer than Python 3.10.
RUN = "import sys; sys.path[:] = filter(None, sys.path); import runpy; runpy.run_module(sys.argv.pop(1), None, '__main__', 1)"


def main(arguments: list[str]) -> int:
    """Replace this process by the packager, or return an exit code."""
    try:
        if arguments[:1] == ["--environment"]:
            ensure(
                Path(arguments[1]).absolute(), Path(arguments[2]), argparse.Namespace(quiet=False)
            )
            return 0
        _, options = parse(arguments)
        require_x86_64()
        settle_home(TOOLS / "cache")
        folder = tools_folder()
        if ensure(folder, LOCK, options):
            remove_outdated(folder)
        become(folder, arguments)
    except VllmEnvError as error:
        tail = [error.tail] if isinstance(error, CommandError) and error.tail else []
        say("\n".join([*tail, *error.lines()]))
        return error.exit_code
    except OSError as error:
        say(f"error: {error.strerror or error}: {error.filename or 'a file'}")
        return 1
    except KeyboardInterrupt:
        return 130


def tools_folder() -> Path:
    """Return the folder of this interpreter's tools, which may not exist yet.

    Raises:
        VllmEnvError: neither the checkout nor the cache can be written.
    """
    name = f"venv-{PYTHON}-{hashlib.sha256(stamp_of(LOCK).encode()).hexdigest()[:8]}"
    if is_made(TOOLS / name, LOCK) or is_writable(TOOLS):
        return TOOLS / name
    return cache_root() / "tools" / name


def ensure(folder: Path, lock: Path, options: argparse.Namespace) -> bool:
    """Make an environment if it is missing; return whether it was made. Of two builds at once, only one makes it.

    Raises:
        VllmEnvError: it cannot be made, or --offline forbids it.
    """
    if is_made(folder, lock):
        return False
    owner = owner_of(ENV if folder.is_relative_to(TOOLS) else folder)
    sources = sources_of(options)
    folder.parent.mkdir(parents=True, exist_ok=True)
    give(folder.parent, owner)
    with locked(
        folder.parent, lambda: say("tools      … another build makes them; waiting for it to end")
    ):
        if is_made(folder, lock):
            return False
        started = time.monotonic()
        if not options.quiet:
            say(f"tools      … into {folder}")
        try:
            install(folder, lock, sources, live=not options.quiet and sys.stderr.isatty())
            require_installed(folder, lock)
            (folder / ".stamp").write_text(stamp_of(lock), "utf-8")
        finally:
            give_tree(folder, owner)
        if not options.quiet:
            say(f"tools      {time.monotonic() - started:6.1f} s")
    return True


def stamp_of(lock: Path) -> str:
    """Return the stamp of an environment: it identifies the interpreter and the lock."""
    return f"{sys.executable} {VERSION} {hashlib.sha256(lock.read_bytes()).hexdigest()}\n"


def is_made(folder: Path, lock: Path) -> bool:
    """Return whether an environment is complete, for this interpreter and lock."""
    stamp = folder / ".stamp"
    readable = os.access(folder / "bin" / "python", os.X_OK) and os.access(stamp, os.R_OK)
    return readable and stamp.read_text("utf-8") == stamp_of(lock)


def sources_of(options: argparse.Namespace) -> list[str]:
    """Return pip's options for the source of wheels: the wheelhouse if it has tools, else none, as pip is configured.

    Raises:
        VllmEnvError: --offline was given and the wheelhouse, if any, has no tools.
    """
    wheelhouse = getattr(options, "wheelhouse", None)
    if wheelhouse and (wheelhouse / "tools").is_dir():
        return ["--isolated", "--no-index", "--find-links", str((wheelhouse / "tools").absolute())]
    if getattr(options, "offline", False):
        raise VllmEnvError(
            f"--offline: cannot install the packager's own tools: they are neither in {TOOLS} nor in a wheelhouse.",
            cause=f"{wheelhouse} has no folder tools."
            if wheelhouse
            else "No --wheelhouse was given.",
            remedy=f"With network and Python {PYTHON}: ./gen_vllm_env.sh wheelhouse DIR; here: --offline --wheelhouse DIR.",
        )
    return []


def install(folder: Path, lock: Path, sources: list[str], *, live: bool) -> None:
    """Make the virtual environment and install the lock into it, with this interpreter's pip or the one from ensurepip."""
    (folder / ".stamp").unlink(missing_ok=True)
    apt = f"Install Python's venv module (apt-get install python{PYTHON}-venv)."
    run(
        [sys.executable, "-I", "-m", "venv", "--clear", "--without-pip", folder],
        what="make a virtual environment",
        remedy=apt,
    )
    (folder / ".stamp").write_text(f"{sys.executable} {VERSION} unfinished\n", "utf-8")
    (folder / "pip.conf").symlink_to(
        Path(sys.prefix) / "pip.conf"
    )  # pip's configuration of this interpreter applies there, too
    python, alone = folder / "bin" / "python", folder / "host"
    pip = importlib.util.find_spec("pip")
    # The host's pip is linked alone: a pip older than 22.3 has no --python, and Debian packages ensurepip separately.
    if pip and pip.submodule_search_locations:
        alone.mkdir()
        (alone / "pip").symlink_to(
            pip.submodule_search_locations[0]
        )  # without the packages next to it
    else:
        run(
            [python, "-m", "ensurepip"],
            what="get a pip",
            remedy="Install pip (apt-get install python3-pip).",
            cwd=folder,
        )
    changes = dict.fromkeys(ASTRAY, "") | {
        "PYTHONPATH": str(alone),
        **({"PIP_CONFIG_FILE": os.devnull} if sources else {}),
    }
    options = [
        "--no-input",
        "--no-user",
        "--disable-pip-version-check",
        "--require-hashes",
        "--requirement",
        lock,
    ]
    remedy = "Check that the package registry answers (pip config list)."
    if sources:
        remedy = f"Fill the wheelhouse again, with Python {PYTHON}; or name the Python that filled it: PYTHON=python3.X."
    command = [python, "-c", RUN, "pip", "install", *sources, *options]
    try:
        Network().program(
            command,
            f"install the packages of {lock}",
            remedy=remedy,
            env=changes,
            on_line=_show if live else None,
        )
    finally:
        if live:
            sys.stderr.write("\r\033[K")


def require_installed(folder: Path, lock: Path) -> None:
    """Check that the lock's distributions are installed: pip's configuration may redirect them, or install nothing."""
    packages = folder / "lib" / f"python{PYTHON}" / "site-packages"
    there = {
        re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower()
        for d in importlib.metadata.distributions(path=[str(packages)])
    }
    missing = sorted(
        set(re.findall(r"^([\w.-]+)==\S+ (?!;)", lock.read_text("utf-8"), re.MULTILINE)) - there
    )
    if missing:
        raise VllmEnvError(
            f"pip has not put {missing[0]} into {packages}.",
            cause="It is configured to install elsewhere, or nothing: target, prefix, root or dry-run.",
            remedy="Remove that from pip's configuration (pip config list), or name none: PIP_CONFIG_FILE=/dev/null.",
        )


def remove_outdated(folder: Path) -> None:
    """Remove this interpreter's environments of other locks, except those in which a packager runs."""
    with locked(folder.parent, lambda: None):
        for other in folder.parent.glob("venv*"):
            stamp = other / ".stamp"
            if (
                other != folder
                and stamp.is_file()
                and stamp.read_text("utf-8").startswith(f"{sys.executable} {VERSION} ")
            ):
                remove_unlocked(other)


def become(folder: Path, arguments: list[str]) -> NoReturn:
    """Replace this process by the packager, which holds the environment's lock while it runs."""
    handle = take_lock(folder, fcntl.LOCK_SH)
    os.set_inheritable(handle, True)  # noqa: FBT003 - the standard library's order
    environment = {**os.environ, "PYTHONPATH": str(ENV)}
    foreign = (
        os.geteuid() == 0 and owner_of(ENV).uid != 0
    )  # root must leave no __pycache__ in a user's checkout
    if foreign or "--dry-run" in arguments:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    python = str(folder / "bin" / "python")
    os.execve(python, [python, "-c", RUN, "vllm_env", *arguments], environment)  # noqa: S606 - no shell is wanted


def say(text: str) -> None:
    """Print a line for the user."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - nothing else is installed yet


def _show(line: str) -> None:
    sys.stderr.write(f"\r\033[K{line.strip()[: shutil.get_terminal_size().columns - 1]}")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
