"""Unpacks an environment's parts once on a machine, and switches this interpreter to the result.

The small archive has this file as ``_vllm_env_unpack/__init__.py`` in its site-packages. Next to it
are ``parts_config.py``, ``parts_places.py`` and ``parts_worker.py``. They use only the standard
library.

The parts are gzip files. zlib unpacks 1.7 GB in 9 s of processor time, as fast as GNU tar. For
zstd, each environment would need a decoder.
"""

import importlib
import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any

from .parts_config import environment_of
from .parts_places import (
    MARK,
    VARIABLE,
    folders_of,
    free,
    hold,
    is_safe,
    is_whole,
    locked,
    mark,
    network_of,
    places,
    remove_unused,
    require_usable,
    sync,
)

FOLDER = "vllm_env.parts"
"""The folder of the parts, next to the small archive."""
DESCRIPTION = "_vllm_env_parts.json"
"""The file in site-packages that lists the parts with their sizes and digests."""
OWN = ("01_vllm_env_parts.pth", "_vllm_env_parts.py", "_vllm_env_unpack", DESCRIPTION)
"""What site-packages has only in the small archive, not in the whole environment."""

_ROUNDS = 5  # of waiting for other starts, each until one of them has ended
# An environment of 57,000 files and folders takes 150 MB more on an ext4 than its files have: their
# last blocks, and the folders.
_BYTES_PER_FILE = 3 * 2**10
_MARGIN = 64 * 2**20  # bytes, for the files of the small archive and for other programs
_MOST_WORKERS = 32
_PERIOD_S = 5.0  # between two lines about the progress

Description = dict[str, Any]
"""The content of ``DESCRIPTION``; sizes in bytes."""
Tell = Callable[[str], object]
"""Takes a line about the progress."""

_package = os.path.dirname(os.path.abspath(__file__))
_site = os.path.dirname(_package)
_prefix = os.path.abspath(os.path.join(_site, "..", "..", ".."))
# The folder of the environment in use, as soon as this interpreter is switched to it.
_trees: list[str] = []
# Re-entrant: a .pth file of the parts may import a module that asks for the parts again.
_lock = threading.RLock()


class UnpackError(ImportError):
    """The parts cannot be used; the message names the cause and the remedy."""


def parts_of(model: str) -> str:
    """Return the folder of a model's parts. It is next to the archive that config.pbtxt names.

    Without a file or a name, the parts are in the model's folder.
    """
    config = os.path.join(model, "config.pbtxt")
    archive = ""
    with suppress(OSError), open(config, encoding="utf-8", errors="replace") as stream:
        archive = environment_of(stream.read()).replace("$$TRITON_MODEL_DIRECTORY", model)
    return os.path.join(os.path.dirname(archive) or model, FOLDER)


def use(model: str, tell: Tell | None = None) -> str:
    """Switch this interpreter to the whole environment and return its folder.

    The parts are unpacked unless an earlier start on this machine has unpacked them. ``tell`` takes
    the lines about the progress. The default writes to standard error, which goes to Triton's log.

    Raises:
        UnpackError: a part is missing or has changed, or no folder can take the environment.
    """
    with _lock:
        if not _trees:
            tree = find(_read_description(), parts_of(model), tell or _to_stderr)
            _switch(tree)
            _trees.append(tree)
        return _trees[0]


def unpack_into(folder: str, parts: str, lock: int | None = None, packed: str = "") -> None:
    """Unpack the whole environment into an empty folder.

    Only the packager calls this, after it has checked the space. If this fails, the packager
    removes the folder.

    Args:
        folder: the empty folder.
        parts: the folder of the parts.
        lock: the descriptor of a locked file. The processes that write to the folder inherit it, so
            that the lock lasts as long as they run.
        packed: the folder that the parts were packed from; empty if it is not on this machine. A
            file that is the same there becomes a hard link to it, which saves writing it.

    Raises:
        UnpackError: a part is missing or has changed, or cannot be unpacked.
        OSError: the folder cannot be written.
    """
    description = _read_description()
    _check_sizes(description, parts)
    _run_workers(description, parts, folder, _to_stderr, lock, packed)


def _read_description() -> Description:
    """Return the list of the parts in this small archive's site-packages."""
    with open(os.path.join(_site, DESCRIPTION), encoding="utf-8") as stream:
        description: Description = json.load(stream)
    return description


def find(description: Description, parts: str, tell: Tell) -> str:
    """Return the folder of the whole environment, unpacked if necessary, and lock it.

    The lock lasts until this process ends.

    Args:
        description: the list of the parts.
        parts: the folder of the parts.
        tell: takes the lines about the progress.

    Raises:
        UnpackError: a part is missing or has changed, or no folder can take the environment.
    """
    candidates = places()
    # 1) Look in all places, before anything is unpacked in a better one.
    for place in candidates:
        tree = os.path.join(place, description["key"])
        if is_safe(place) and is_whole(tree) and _hold_found(tree, tell):
            tell(f"the environment is unpacked in {tree}")
            return tree
    # 2) Unpack in the first place that can be used.
    _check_sizes(description, parts)
    reasons = []
    for place in candidates:
        tree = os.path.join(place, description["key"])
        try:
            os.makedirs(place, mode=0o700, exist_ok=True)
            require_usable(place)
            _warn_of_network(place, tell)
            _unpack_once(tree, description, parts, tell)
        except OSError as error:
            reasons.append(f"{place}: {error.strerror or error}")
            tell(f"cannot unpack in {reasons[-1]}")
        else:
            return tree
    raise UnpackError(
        f"No folder can take the unpacked environment ({description['unpacked'] / 1e9:.1f} GB): "
        f"{'; '.join(reasons)}. Set {VARIABLE} to a folder on a local disk with enough space, "
        "or build with --layout archive or directory."
    )


def _hold_found(tree: str, tell: Tell) -> bool:
    """Lock an environment that an earlier start has unpacked; return whether it can be used."""
    _warn_of_network(os.path.dirname(tree), tell)
    try:
        is_held = hold(tree)
    except OSError as error:
        tell(f"cannot use {tree}: {error.strerror or error}")
        return False
    with suppress(OSError):
        os.utime(os.path.join(tree, MARK))  # `remove_unused` goes by this time
    return is_held


def _warn_of_network(place: str, tell: Tell) -> None:
    """Log a warning if a folder is on a network; call this before taking a lock there.

    Waiting for such a lock may never end.
    """
    if network := network_of(place):
        tell(
            f"{place} is on a network file system ({network}): slow starts. If this start hangs, "
            f"set {VARIABLE} to a folder on a local disk"
        )


def space_for(description: Description) -> int:
    """Return the bytes that must be free to unpack an environment."""
    files = sum(part["members"] for part in description["parts"])
    needed: int = description["unpacked"] + files * _BYTES_PER_FILE + _MARGIN
    return needed


def _unpack_once(tree: str, description: Description, parts: str, tell: Tell) -> None:
    """Unpack an environment into the folder ``tree`` and lock it, or wait for another start.

    Raises:
        UnpackError: a part has changed.
        OSError: it cannot be unpacked there, or other starts failed to do so.
    """
    for _ in range(_ROUNDS):
        # A BlockingIOError says that another process has the lock.
        with suppress(BlockingIOError), locked(tree) as lock:
            if not is_whole(tree):
                _unpack(tree, description, parts, tell, lock)
        if not is_whole(tree):
            tell(f"another start unpacks the environment in {tree}; waiting for it")
        # This waits for the other start. It returns False if that start has failed.
        if hold(tree):
            return
        time.sleep(1)
    # Those who hold the lock do not unpack: they use an environment that has lost its mark.
    raise OSError(f"a running process uses {tree}, which is damaged")


def _unpack(tree: str, description: Description, parts: str, tell: Tell, lock: int) -> None:
    """Unpack an environment into the folder ``tree``. This process holds its lock.

    ``lock`` is the descriptor of the locked file.

    Raises:
        UnpackError: a part has changed.
        OSError: too little space is free, or the folder cannot be written.
    """
    began = time.monotonic()
    place, key = os.path.split(tree)
    needed = space_for(description)
    # 1) Make room. The previous environment goes only if there is no other way.
    for unfinished in folders_of(tree):
        shutil.rmtree(unfinished, ignore_errors=True)
    remove_unused(place)
    if free(place) < needed:
        remove_unused(place, 0)
    if free(place) < needed:
        raise OSError(f"{free(place) / 1e9:.1f} GB are free, {needed / 1e9:.1f} GB are needed")
    # 2) Unpack under another name, so that no start takes an unfinished folder for a whole one.
    staging = tempfile.mkdtemp(prefix=f"{key}.", dir=place)
    try:
        _run_workers(description, parts, staging, tell, lock)
        mark(staging, synced=False)
        os.rename(staging, tree)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    tell(f"unpacked {description['unpacked'] / 1e9:.1f} GB in {time.monotonic() - began:.1f} s")
    # 3) Have the disk write it, while the model goes on loading.
    threading.Thread(target=sync, args=(tree,), name="vllm_env-sync", daemon=True).start()


def _run_workers(
    description: Description,
    parts: str,
    staging: str,
    tell: Tell,
    lock: int | None,
    packed: str = "",
) -> None:
    """Copy the small archive and unpack all parts into the folder ``staging``, on all cores.

    ``lock`` and ``packed`` are as in :func:`unpack_into`. The first failure ends this.

    Raises:
        UnpackError: a part has changed.
        OSError: the folder cannot be written.
    """
    # The largest first: a large one at the end would keep the other cores waiting.
    jobs = sorted(description["parts"], key=lambda part: part["unpacked"], reverse=True)
    workers = min(_MOST_WORKERS, len(jobs) + 1, cores())
    gigabytes = f"{description['unpacked'] / 1e9:.1f} GB"
    tell(f"unpacking {gigabytes} with {workers} processes into {staging}")
    done = 0
    last_report = time.monotonic()
    # Each thread waits for a process, since tarfile and the creation of 60,000 files hold the
    # interpreter's lock. 16 cores write 7.6 GB in 8 to 12 s, where tar on one core takes 61 to 74 s
    # (an H200's host).
    with ThreadPoolExecutor(workers) as pool:
        # The bytes that are unpacked when a future is done.
        sizes = {pool.submit(_run_worker, lock, "base", _prefix, staging, *OWN): 0}
        for part in jobs:
            file = os.path.join(parts, part["name"])
            job = ("part", file, part["sha256"], staging, packed)
            future = pool.submit(_run_worker, lock, *job)
            sizes[future] = part["unpacked"]
        try:
            for future in as_completed(sizes):
                future.result()
                done += sizes[future]
                if time.monotonic() - last_report > _PERIOD_S:
                    last_report = time.monotonic()
                    tell(f"unpacked {done / description['unpacked']:.0%} of the environment")
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _run_worker(lock: int | None, *job: str) -> None:
    """Run ``parts_worker.py`` with the arguments ``job``; ``lock`` is as in :func:`unpack_into`.

    Raises:
        UnpackError: a part has changed, so another folder would not help.
        OSError: the folder cannot be written.
    """
    # -I -S: the worker needs nothing of site-packages, nor its .pth files.
    # -B: bytecode in the small archive would become a part of the whole environment.
    python = [os.path.join(_prefix, "bin", "python"), "-I", "-S", "-B"]
    done = subprocess.run(
        [*python, os.path.join(_package, "parts_worker.py"), *job],
        capture_output=True,
        check=False,
        # The worker keeps the lock: if this process is killed, the next start would otherwise
        # delete the unfinished folder while the worker writes to it.
        pass_fds=() if lock is None else (lock,),
        stdin=subprocess.DEVNULL,
    )
    if done.returncode == 0:
        return
    reason = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    number, _, text = reason.partition(" ")
    # An error of the system begins with its number.
    if number.isdigit():
        raise OSError(int(number), text)
    # No reason: the kernel has killed the process.
    raise UnpackError(
        reason or f"A process that unpacks ended with status {done.returncode}; free some memory."
    )


def _check_sizes(description: Description, parts: str) -> None:
    """Raise UnpackError if a part is missing or has another size; the workers compare digests."""
    for part in description["parts"]:
        file = os.path.join(parts, part["name"])
        try:
            size = os.stat(file).st_size
            problem = "" if size == part["size"] else f"{size} bytes instead of {part['size']}"
        except OSError as error:
            problem = str(error.strerror)
        if problem:
            raise UnpackError(
                f"{file}: {problem}. Copy the model's whole folder again, or build it again."
            )


def _switch(tree: str) -> None:
    """Make this interpreter and its children use the whole environment, not the small archive."""

    def in_tree(path: str) -> str:
        """Return where a path of the small archive is in the tree; other paths do not change."""
        if path == _prefix or path.startswith(_prefix + os.sep):
            return tree + path[len(_prefix) :]
        return path

    sys.path[:] = [in_tree(path) for path in sys.path]
    prefixes = ("prefix", "exec_prefix", "base_prefix", "base_exec_prefix")
    for name in (*prefixes, "executable", "_base_executable"):
        setattr(sys, name, in_tree(getattr(sys, name, "") or ""))
    for name, value in os.environ.items():
        if _prefix in value:
            os.environ[name] = os.pathsep.join(map(in_tree, value.split(os.pathsep)))
    # By name: the import of the finder's module would add another finder.
    sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != "PartsFinder"]
    importlib.invalidate_caches()
    # Runs the .pth files of the packages in the parts.
    site.addsitedir(in_tree(_site))


def cores() -> int:
    """Return how many cores this process may use."""
    count = len(os.sched_getaffinity(0))
    # A container's limit (cgroup v2) is a quota of processor time in a period, or "max", which
    # is no number.
    with suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max", encoding="ascii") as stream:
        quota, period = map(int, stream.read().split())
        rounded_up = -(-quota // period)
        count = min(count, max(1, rounded_up))
    return count


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"vllm_env: {line}\n")
    sys.stderr.flush()
