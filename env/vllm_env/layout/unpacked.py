"""The folders where this user's servers look for unpacked environments.

A build unpacks there what it checks, so that the first server need not do it.
"""

import fcntl
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from vllm_env.base import report
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import free_space, nearest
from vllm_env.inside import parts_places, parts_unpack
from vllm_env.prefix.relocate import site_packages

SYNC_THREAD = "sync of an unpacked environment"
"""The name of the thread that writes an environment to the disk, and then marks it again."""


@contextmanager
def unpacked_for_servers(
    small: Path, unpack: Callable[[Path, int], object]
) -> Iterator[Path | None]:
    """Unpack an environment in the folder in which a model's start would unpack it.

    Servers can use it in the block. It is removed if the block fails, unless a server uses it.

    Args:
        small: the extracted small archive. It has the list of the parts.
        unpack: unpacks the parts into an empty folder. It also takes the descriptor of the
            environment's lock, for the programs that write there.

    Yields:
        The environment. None if it is there already, or if no folder can take it.
    """
    description = json.loads((site_packages(small) / parts_unpack.DESCRIPTION).read_text("utf-8"))
    key = description["key"]
    with ExitStack() as until_checked:
        # 1) Choose the folder and lock it, unless a server has the environment already.
        tree = None if _is_there(key) else _make_room(description)
        lock = None
        if tree:
            # An error: a server unpacks it at this moment.
            with suppress(OSError):
                lock = until_checked.enter_context(parts_places.locked(str(tree)))
        # A server may have unpacked it before this process had the lock.
        if tree is None or lock is None or parts_places.is_whole(str(tree)):
            yield None
            return
        # 2) Unpack under another name, so that no server uses an unfinished folder.
        report.step(f"unpacking into {tree.parent}")
        # A build or a start that was killed has left these.
        for folder in parts_places.folders_of(str(tree)):
            shutil.rmtree(folder, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=tree.parent))
        try:
            unpack(staging, lock)
            parts_places.mark(str(staging), synced=False)
            staging.rename(tree)
            # Shared with the servers that use it: no process removes it meanwhile.
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield tree
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            # If a server uses it already, the exclusive lock cannot be taken, and it stays.
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(tree, ignore_errors=True)
            raise
    # 3) Have the disk write it while the build goes on, as a model's start does it.
    threading.Thread(
        target=parts_places.sync, args=(str(tree),), name=SYNC_THREAD, daemon=True
    ).start()


def require_places(needed: int, purpose: str) -> None:
    """Check that a server finds space for an unpacked environment, or has one already.

    Args:
        needed: bytes.
        purpose: who starts the server, for the error.

    Raises:
        VllmEnvError: no folder has the space.
    """
    free = {}
    for place in local_places():
        # An OSError: this user cannot read the folder.
        with suppress(OSError):
            # An environment is at the name of its lock. If there is any, a start uses it, or
            # removes it for its own.
            locks = place.glob("*.lock")
            if any(parts_places.is_whole(str(lock.with_suffix(""))) for lock in locks):
                return
        free[place] = free_space(place)
    # Without any folder, the server's log names the reason for each one.
    if free and max(free.values()) < needed:
        listed = ", ".join(f"{space / 1e9:.1f} GB in {place}" for place, space in free.items())
        raise VllmEnvError(
            f"No space: {purpose} unpacks {needed / 1e9:.1f} GB, and there are only {listed}.",
            remedy=f"Free some space, or name a larger folder: {parts_places.VARIABLE}=DIR. "
            "--no-smoke-run leaves it to the server that will load the model.",
        )


def local_places() -> list[Path]:
    """Return the folders that are on a disk of this machine, or that the operator names."""
    return [
        Path(place)
        for place in parts_places.places()
        if parts_places.is_named(place) or not parts_places.network_of(str(nearest(Path(place))))
    ]


def _is_there(key: str) -> bool:
    """Return whether a folder of this user's servers has the whole environment."""
    places = parts_places.places()
    return any(parts_places.is_whole(str(Path(place, key))) for place in places)


def _make_room(description: parts_unpack.Description) -> Path | None:
    """Return where the first folder that can take an environment would have it, or None.

    Environments that no server uses are removed, as a model's start does it.
    """
    for place in parts_places.places():
        with suppress(OSError):
            Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)
            parts_places.require_usable(place)
            parts_places.remove_unused(place)
            if parts_places.free(place) >= parts_unpack.space_for(description):
                return Path(place, description["key"])
    return None
