"""Make the packager's own virtual environment, then run the packager in it.

There is one environment per lock and interpreter, in the checkout's ``.tools/venv-X.Y-KEY``, or
below the cache if the checkout cannot be written. This file uses only the standard library.

    bootstrap.py ARGUMENT…                    run the packager, as gen_vllm_env.sh does
    bootstrap.py --environment FOLDER LOCK    only make an environment, for tests/run.sh
"""

import signal

# Until main() can take a Ctrl-C, it waits: during the imports it would print a traceback. A program
# that only imports this file keeps its signals.
if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


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
import sysconfig
import time
from pathlib import Path
from typing import Any, NoReturn

from vllm_env.base.cache import cache_root, settle_home
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import file_sha256, give, give_tree, is_writable, owner_of
from vllm_env.base.locks import locked, remove_unlocked, take_lock
from vllm_env.base.machine import this_platform
from vllm_env.base.network import Network, PipConfig, parse_pip_config, without_uv_settings
from vllm_env.base.process import run
from vllm_env.cli.parser import parse
from vllm_env.inside import parts_places

ENV = Path(__file__).resolve().parent
TOOLS = ENV.parent / ".tools"
LOCK = ENV / "requirements.txt"
VERSION = platform.python_version()
PYTHON = sysconfig.get_python_version()
# Settings of pip that would install to another place, or nothing.
ASTRAY = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_DRY_RUN", "PIP_PYTHON", "PIP_CONSTRAINT")
# ``python -m`` would put the current folder first in sys.path: a module there would be imported.
# The option against that (-P) is newer than Python 3.10.
RUN = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "import runpy; runpy.run_module(sys.argv.pop(1), None, '__main__', 1)"
)


def main(arguments: list[str]) -> int:
    """Replace this process by the packager, or return an exit code."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        if arguments[:1] == ["--environment"]:
            if len(arguments) < 3:
                say("usage: bootstrap.py --environment FOLDER LOCK")
                return 2
            # The options of a build without any: ensure() asks for --quiet and --offline.
            _, options = parse([])
            ensure(Path(arguments[1]).absolute(), Path(arguments[2]), options)
            return 0
        # A wrong option, --help and --version need no tools, so they come first.
        _, options = parse(arguments)
        # Raises an error on a machine that no environment is built for.
        this_platform()
        # From here on, the caches are where this user can write.
        settle_home(TOOLS / "cache", parts_places.without_home())
        folder = tools_folder()
        if ensure(folder, LOCK, options):
            remove_outdated(folder)
        become(folder, arguments)
    except VllmEnvError as error:
        say("\n".join(error.lines()))
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
    # Several interpreters may share a checkout: a container's and the host's, for example.
    name = f"venv-{PYTHON}-{hashlib.sha256(stamp_of(LOCK).encode()).hexdigest()[:8]}"
    if is_made(TOOLS / name, LOCK) or is_writable(TOOLS):
        return TOOLS / name
    return cache_root() / "tools" / name


def ensure(folder: Path, lock: Path, options: argparse.Namespace) -> bool:
    """Make a virtual environment with the packages of a lock; return whether it was missing.

    Raises:
        VllmEnvError: it cannot be made, or --offline forbids it.
    """
    # The usual case locks and writes nothing.
    if is_made(folder, lock):
        return False
    # In a container, root makes the tools in a user's checkout. They must belong to the user.
    owner = owner_of(ENV if folder.is_relative_to(TOOLS) else folder)
    sources = sources_of(options)
    folder.parent.mkdir(parents=True, exist_ok=True)
    give(folder.parent, owner)
    waiting = "tools      … another build makes them; waiting for it to end"
    with locked(folder.parent, lambda: say(waiting)):
        # The build that held the lock has made it.
        if is_made(folder, lock):
            return False
        started = time.monotonic()
        if not options.quiet:
            say(f"tools      … into {folder}")
        try:
            install(folder, lock, sources, live=not options.quiet and sys.stderr.isatty())
            # Last: an environment that a killed build left must not count as complete.
            (folder / ".stamp").write_text(stamp_of(lock), "utf-8")
        finally:
            give_tree(folder, owner)
        if not options.quiet:
            say(f"tools      {time.monotonic() - started:6.1f} s")
    return True


def stamp_of(lock: Path) -> str:
    """Return the stamp of an environment: it identifies the interpreter and the lock."""
    return f"{sys.executable} {VERSION} {file_sha256(lock)}\n"


def is_made(folder: Path, lock: Path) -> bool:
    """Return whether an environment is complete, for this interpreter and lock."""
    has_python = os.access(folder / "bin" / "python", os.X_OK)
    return has_python and read_stamp(folder) == stamp_of(lock)


def read_stamp(folder: Path) -> str:
    """Return the stamp of an environment, or an empty string if it has none that can be read."""
    try:
        return (folder / ".stamp").read_text("utf-8")
    # A file that is not UTF-8 raises a ValueError.
    except (OSError, ValueError):
        return ""


def sources_of(options: argparse.Namespace) -> list[str]:
    """Return pip's options for the tools of a wheelhouse; without any, pip asks its registry.

    Raises:
        VllmEnvError: --offline was given and the wheelhouse, if any, has no tools.
    """
    cause = "No --wheelhouse was given."
    if options.wheelhouse:
        tools = options.wheelhouse / "tools"
        # --isolated and --no-index: pip must not ask the registries of its configuration as well.
        if tools.is_dir():
            return ["--isolated", "--no-index", "--find-links", str(tools.absolute())]
        cause = f"{options.wheelhouse} has no folder tools."
    if options.offline:
        raise VllmEnvError(
            "--offline: cannot install the packager's own tools: "
            f"they are neither in {TOOLS} nor in a wheelhouse.",
            cause=cause,
            remedy=f"With network and Python {PYTHON}: ./gen_vllm_env.sh wheelhouse DIR; "
            "here: --offline --wheelhouse DIR.",
        )
    return []


def install(folder: Path, lock: Path, sources: list[str], *, live: bool) -> None:
    """Make the virtual environment and install the lock into it.

    Args:
        folder: the environment. What is in it is removed.
        lock: a file of requirements with hashes.
        sources: pip's options for a wheelhouse, as :func:`sources_of` returns them.
        live: whether to show the installer's current line on the terminal.

    Raises:
        VllmEnvError: a package cannot be fetched, or is not in the environment afterwards.
    """
    python = folder / "bin" / "python"
    host = folder / "host"
    _make_empty(folder)
    _provide_pip(python, host)
    # pip installs uv, and uv the rest: it needs 3 s for that, and pip would need 15.
    changes = {**dict.fromkeys(ASTRAY, ""), "PYTHONPATH": str(host)}
    remedy = "Check that the package registry answers (pip config list)."
    if sources:
        # --isolated ignores PIP_* variables and the user's file, but not a global pip.conf.
        changes["PIP_CONFIG_FILE"] = os.devnull
        remedy = (
            f"Fill the wheelhouse again, with Python {PYTHON}; "
            "or name the Python that filled it: PYTHON=python3.X."
        )
    pip_command = [python, "-c", RUN, "pip"]
    options = ["--no-input", "--no-user", "--disable-pip-version-check", "--require-hashes"]
    messages: dict[str, Any] = {"what": f"install the packages of {lock}", "remedy": remedy}
    messages["on_line"] = _show if live else None
    # A lock without uv is installed by pip alone.
    requirements = lock
    uv = entry_of("uv", lock)
    if uv:
        requirements = folder / "uv.txt"
        requirements.write_text(uv, "utf-8")
    try:
        arguments = [*sources, *options, "--no-compile", "--requirement", requirements]
        Network().program([*pip_command, "install", *arguments], env=changes, **messages)
        # pip ends with 0 also if its configuration sends the packages to another folder.
        require_installed(folder, requirements)
        if uv:
            command = [*pip_command, "config", "list"]
            listing = run(command, what="read pip's configuration", env=changes)
            with_uv(folder, lock, parse_pip_config(listing), sources, messages)
            require_installed(folder, lock)
    finally:
        if live:
            # Clear the line of the terminal.
            sys.stderr.write("\r\033[K")


def _make_empty(folder: Path) -> None:
    """Make a virtual environment without packages; pip in it has the host's configuration."""
    # remove_outdated() knows an environment by its stamp, so an unfinished one needs one, too.
    stamp = folder / ".stamp"
    if stamp.is_file():
        stamp.unlink()
    run(
        [sys.executable, "-I", "-m", "venv", "--clear", "--without-pip", folder],
        what="make a virtual environment",
        remedy=f"Install Python's venv module (apt-get install python{PYTHON}-venv).",
    )
    stamp.write_text(f"{sys.executable} {VERSION} unfinished\n", "utf-8")
    # pip looks for this file in the prefix of its interpreter, which is now the new environment.
    (folder / "pip.conf").symlink_to(Path(sys.prefix, "pip.conf"))


def _provide_pip(python: Path, host: Path) -> None:
    """Let an environment's interpreter import a pip, with ``host`` in its PYTHONPATH.

    Args:
        python: the interpreter.
        host: a folder to make, with a link to the pip of the Python that runs this.
    """
    # A pip older than 22.3 cannot install for another interpreter (--python). So the environment's
    # own interpreter runs the host's pip. It is linked alone, without the packages next to it.
    pip = importlib.util.find_spec("pip")
    if pip and pip.submodule_search_locations:
        host.mkdir()
        (host / "pip").symlink_to(pip.submodule_search_locations[0])
    else:
        # The second choice: it starts later, and Debian has it in a package of its own.
        run(
            [python, "-m", "ensurepip"],
            what="get a pip",
            remedy="Install pip (apt-get install python3-pip).",
            cwd=python.parents[1],
        )


def with_uv(
    folder: Path, lock: Path, config: PipConfig, sources: list[str], messages: dict[str, Any]
) -> None:
    """Install a lock with the environment's own uv, from where pip would take the packages.

    ``messages`` are the arguments ``what``, ``remedy`` and ``on_line`` of ``process.run``.
    """
    from_where = config.uv_arguments()
    if sources:
        # Of pip's options, uv knows only the folder.
        from_where = ["--offline", "--no-index", *sources[sources.index("--find-links") :]]
    how = ["--link-mode", "hardlink"]
    if serves_another():
        # Copied: root gives the files to the owner of the checkout, but it does not give away a
        # file with several links.
        # Compiled now: builds by root write no bytecode into a user's checkout, and would compile
        # all imports each time.
        how = ["--link-mode", "copy", "--compile-bytecode"]
    options = ["--no-config", "--require-hashes", *how]
    python = folder / "bin" / "python"
    command = [folder / "bin" / "uv", "pip", "install", "--python", python, *options, *from_where]
    environment = {**without_uv_settings(), **config.uv_environment()}
    Network().program([*command, "--requirement", lock], env=environment, **messages)


def entry_of(name: str, lock: Path) -> str:
    """Return a package's lines in a lock, its version and its digests; "" if it is not there."""
    # All lines of an entry but the last one end with a backslash.
    entry = re.search(rf"^{name}==(.*\\\n)*.*\n", lock.read_text("utf-8"), re.MULTILINE)
    return entry[0] if entry else ""


def require_installed(folder: Path, lock: Path) -> None:
    """Check that the lock's distributions are installed.

    Raises:
        VllmEnvError: one of them is missing.
    """
    packages = folder / "lib" / f"python{PYTHON}" / "site-packages"
    distributions = importlib.metadata.distributions(path=[str(packages)])
    # As the lock writes names: my-package, not My_Package.
    names = {re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower() for d in distributions}
    # Without the lines that have a marker: these packages may not be for this machine.
    for name in re.findall(r"^([\w.-]+)==\S+ (?!;)", lock.read_text("utf-8"), re.MULTILINE):
        if name not in names:
            raise VllmEnvError(
                f"pip has not put {name} into {packages}.",
                cause="It is configured to install elsewhere, or nothing: "
                "target, prefix, root or dry-run.",
                remedy="Remove that from pip's configuration (pip config list), "
                "or name none: PIP_CONFIG_FILE=/dev/null.",
            )


def remove_outdated(folder: Path) -> None:
    """Remove this interpreter's environments of other locks, unless a packager runs in them."""
    with locked(folder.parent, lambda: None):
        for other in folder.parent.glob("venv*"):
            is_own = read_stamp(other).startswith(f"{sys.executable} {VERSION} ")
            if is_own and other != folder:
                remove_unlocked(other)


def become(folder: Path, arguments: list[str]) -> NoReturn:
    """Replace this process by the packager."""
    # The packager inherits the lock and holds it while it runs: see remove_outdated().
    handle = take_lock(folder, fcntl.LOCK_SH)
    os.set_inheritable(handle, True)  # noqa: FBT003 - the standard library's order
    environment = {**os.environ, "PYTHONPATH": str(ENV)}
    # Root must leave no __pycache__ in a user's checkout, and a dry run none at all.
    if serves_another() or "--dry-run" in arguments:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [str(folder / "bin" / "python"), "-c", RUN, "vllm_env", *arguments]
    # The packager, too, takes a Ctrl-C only after its imports (interrupts.py).
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    os.execve(command[0], command, environment)  # noqa: S606 - no shell is wanted


def serves_another() -> bool:
    """Return whether this is root in the checkout of another user, as in a container."""
    return os.geteuid() == 0 and owner_of(ENV).uid != 0


def say(text: str) -> None:
    """Print a line for the user."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - nothing else is installed yet


def _show(line: str) -> None:
    sys.stderr.write(f"\r\033[K{line.strip()[: shutil.get_terminal_size().columns - 1]}")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
