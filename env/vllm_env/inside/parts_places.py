"""Finds, checks, locks and removes unpacked environments in the folders of this machine.

    PLACE/KEY/         The whole environment, as `--layout directory` has it. Renamed when complete.
    PLACE/KEY/.whole   Written last: the boot of the machine, and whether the disk has all files.
    PLACE/KEY.XXXXXX/  Unfinished. If its start was killed, the next start removes it.
    PLACE/KEY.lock     A lock (flock): exclusive to unpack and to remove, shared while in use.

This file is copied into the small archive, next to ``parts_unpack.py``, and uses only the standard
library. The packager imports it, too: ``clean`` removes the environments that no server uses.
"""
# ruff: noqa: PTH100, PTH104, PTH111, PTH116, PTH118, PTH208

import ctypes
import fcntl
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

VARIABLE = "VLLM_ENV_UNPACKED"
"""The variable that names a folder for unpacked environments."""
MARK = ".whole"
"""The file in an unpacked environment that says when it is complete."""

_TMP = "/tmp"  # noqa: S108 - names and owners are checked
_MOUNTS = "/proc/self/mountinfo"
# Unused environments that stay. A deployment may go back to the last one.
_KEPT = 1
# The keys are those of ``key_of``. A folder that the operator names may have other locks in it.
_LOCK = re.compile(r"[0-9a-f]{32}\.lock")
# Writing 60,000 files there takes minutes, and each start reads them from there. The numbers are
# those of statfs(2). 9p is not listed: a container's own disk may be one.
_NETWORKS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB2",
    0xFF534D42: "CIFS",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
}
# Behind FUSE may be a network (sshfs, s3fs, gcsfuse) or a disk. These are disks, by their names in
# mountinfo; a container without root may have its own disk on fuse-overlayfs.
_FUSE = 0x65735546
_FUSE_ON_DISK = {
    "fuseblk",
    "fuse.fuse-overlayfs",
    "fuse.mergerfs",
    "fuse.bindfs",
    "fuse.gocryptfs",
    "fuse.encfs",
}
# The lock files of the environments in use. They stay open until this process ends.
_held: list[int] = []


def places() -> list[str]:
    """Return the folders for unpacked environments, best first (docs/layouts.md lists them)."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    candidates = [
        os.environ.get(VARIABLE, ""),
        os.path.join(cache, "vllm_env", "unpacked"),
        _temporary_place(),
        os.path.join(_TMP, _own_name()),
    ]
    # A "~" is left if this user has no home.
    usable = [os.path.abspath(path) for path in candidates if path and not path.startswith("~")]
    return list(dict.fromkeys(usable))


def without_home() -> dict[str, str]:
    """Return the variable for a build whose caches are not in the home.

    A server does not know that other folder. It looks among the temporary files, too.
    """
    return {VARIABLE: _temporary_place()}


def _temporary_place() -> str:
    temporary = _TMP
    # Python looks for a folder that can be written, and raises an error if it finds none.
    with suppress(FileNotFoundError):
        temporary = tempfile.gettempdir()
    return os.path.join(temporary, _own_name())


def _own_name() -> str:
    return f"vllm_env_unpacked_{os.geteuid()}"


def is_whole(tree: str) -> bool:
    """Return whether ``tree`` is a whole environment.

    If the machine was restarted before the disk had all of it, files may be empty. Such an
    environment is not trusted.
    """
    with suppress(OSError, ValueError), open(os.path.join(tree, MARK), encoding="utf-8") as stream:
        state = json.load(stream)
        return bool(state.get("synced")) or state.get("boot") == _boot()
    return False


def remove_unused(place: str, keep: int = _KEPT, *, dry_run: bool = False) -> list[str]:
    """Remove a place's environments that no process uses, except the ``keep`` last used ones.

    Return the removed folders; ``dry_run`` only lists them. Folders with other names stay, and a
    place that other users can write to is not searched.
    """
    try:
        names = os.listdir(place) if is_safe(place) else []
    except OSError:
        return []
    keys = [name.partition(".")[0] for name in names if _LOCK.fullmatch(name)]
    # The last used one first.
    keys.sort(key=lambda key: _last_use(os.path.join(place, key)), reverse=True)
    removed = []
    for key in keys:
        tree = os.path.join(place, key)
        # locked() raises an error if a process uses the environment, which then stays.
        with suppress(OSError), locked(tree):
            unused = folders_of(tree)
            if keep > 0 and tree in unused:
                unused.remove(tree)
                keep -= 1
            removed += unused
            # Under this key's own lock: a start may use another key again by now.
            if not dry_run:
                for path in unused:
                    shutil.rmtree(path, ignore_errors=True)
    return removed


@contextmanager
def locked(tree: str) -> Iterator[int]:
    """Hold an environment's lock exclusively.

    Raises:
        BlockingIOError: a process has it.
        OSError: it cannot be taken.
    """
    # O_NOFOLLOW: a link in the lock's place must not lead to another file.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(f"{tree}.lock", flags, 0o600)
    try:
        _flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield handle
    finally:
        os.close(handle)


def hold(tree: str) -> bool:
    """Keep an environment's shared lock until this process ends; return whether it is whole.

    This waits while another process has the exclusive lock, to unpack or to remove. The lock is not
    kept if the environment is not whole.

    Raises:
        OSError: the lock cannot be taken.
    """
    try:
        handle = os.open(f"{tree}.lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        # No process has unpacked this environment here.
        return False
    is_held = False
    try:
        _flock(handle, fcntl.LOCK_SH)
        is_held = is_whole(tree)
    finally:
        if not is_held:
            os.close(handle)
    if is_held:
        _held.append(handle)
    return is_held


def _flock(handle: int, operation: int) -> None:
    """Lock an open file with flock(2); ``operation`` is the kind of lock.

    Raises:
        BlockingIOError: a process has the file locked, and ``operation`` has LOCK_NB.
        OSError: the file system has no locks; the message tells the user what to do.
    """
    try:
        fcntl.flock(handle, operation)
    except BlockingIOError:
        raise
    # For example on NFS, if its lock service does not run.
    except OSError as error:
        raise OSError(
            error.errno, f"its files cannot be locked ({error.strerror}); use a local disk"
        ) from error


def folders_of(tree: str) -> list[str]:
    """Return an environment's folder and the unfinished ones next to it, those that exist."""
    place, key = os.path.split(tree)
    # KEY, KEY.XXXXXX and KEY.lock.
    names = [name for name in os.listdir(place) if name.partition(".")[0] == key]
    return [os.path.join(place, name) for name in names if not name.endswith(".lock")]


def is_safe(place: str) -> bool:
    """Return whether only this user and root can have put files into a place: they will be run."""
    with suppress(OSError):
        status = os.stat(place)
        # A link has an owner, too: in /tmp every user can make one.
        owners = {status.st_uid, os.lstat(place).st_uid}
        is_own = owners <= {0, os.geteuid()}
        others_may_write = bool(status.st_mode & 0o022)
        return is_own and not others_may_write
    return False


def require_usable(place: str) -> None:
    """Check that an environment may be unpacked in a place and run from there.

    Raises:
        PermissionError: an environment cannot be written there, or not run from there.
    """
    if not is_safe(place):
        raise PermissionError(
            "it belongs to another user, or others may write there; "
            f"name a subfolder of it, or chmod go-w {place}"
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(f"user {os.geteuid()} may not write there")
    if os.statvfs(place).f_flag & os.ST_NOEXEC:
        raise PermissionError("it is mounted noexec, and libraries are run from there")
    network = network_of(place)
    if network and not is_named(place):
        raise PermissionError(f"it is on a network file system ({network})")


def is_named(place: str) -> bool:
    """Return whether the operator has named a place: then it is used, also on a network."""
    named = os.environ.get(VARIABLE, "")
    return bool(named) and os.path.abspath(named) == place


def network_of(place: str) -> str:
    """Return the name of the network file system that a place is on; "" if it is on another one."""
    number = _file_system(place)
    if number == _FUSE:
        name = _name_of_fuse(place)
        return "" if name in _FUSE_ON_DISK else name
    return _NETWORKS.get(number, "")


def _name_of_fuse(place: str) -> str:
    """Return the type of the FUSE mount that has a place, such as ``fuse.sshfs``."""
    number = os.stat(place).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    with open(_MOUNTS, encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            # Two lists (proc_pid_mountinfo(5)): the third field is the device; after " - " comes
            # the type.
            left, _, right = line.partition(" - ")
            if left.split()[2] == device:
                return right.split()[0]
    return "fuse"  # no line has the device


def _file_system(place: str) -> int:
    """Return the kernel's number for the type of a place's file system; 0 if it is not known."""
    # Python's os.statvfs() does not return the type.
    status = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None).statfs(os.fsencode(place), status) != 0:
        return 0
    # The field f_type is the first one, and a long. The numbers of _NETWORKS have 32 bits.
    return int.from_bytes(status.raw[:4], sys.byteorder)


def free(place: str) -> int:
    """Return the free bytes of a place's file system."""
    return shutil.disk_usage(place).free


def _last_use(tree: str) -> float:
    with suppress(OSError):
        return os.stat(os.path.join(tree, MARK)).st_mtime
    return 0.0


def _boot() -> str:
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
        return stream.read().strip()
    return ""


def mark(tree: str, *, synced: bool) -> None:
    """Mark an environment as complete; ``synced`` says that the disk has it."""
    new = os.path.join(tree, f"{MARK}.new")
    with open(new, "w", encoding="utf-8") as stream:
        json.dump({"boot": _boot(), "synced": synced}, stream)
    os.rename(new, os.path.join(tree, MARK))


def sync(tree: str) -> None:
    """Have the disk write an environment. Before that, it is not trusted after a restart."""
    # syncfs(2) writes all of a file system and takes any open file of it.
    with suppress(OSError), open(os.path.join(tree, MARK), encoding="utf-8") as stream:
        if ctypes.CDLL(None).syncfs(stream.fileno()) == 0:
            mark(tree, synced=True)
