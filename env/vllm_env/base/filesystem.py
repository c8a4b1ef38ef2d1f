"""Files, folders, mount points and owners: root in a container leaves nothing of root's in a folder of a host user."""

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

from .errors import SPACE_REMEDY, VllmEnvError

_MOUNTINFO = Path("/proc/self/mountinfo")


class Owner(NamedTuple):
    """User and group, by number."""

    uid: int
    gid: int


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):  # Python 3.10 has no hashlib.file_digest
            digest.update(chunk)
    return digest.hexdigest()


def tree_size(path: Path) -> int:
    """Return the size in bytes of a file, or of all files below a folder; what is gone, or goes meanwhile, has none."""
    below = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    size = 0
    for file in below if path.is_dir() else (path,):
        with contextlib.suppress(FileNotFoundError):
            size += file.lstat().st_size
    return size


def remove_tree(path: Path) -> None:
    """Remove a folder and all it holds; do nothing if it does not exist, or if something is mounted in it.

    A volume that the user has mounted there would be emptied, and its mount point would stay all the same.
    """
    if not mounts_in(path):
        shutil.rmtree(path, ignore_errors=True)


def put_in_place(made: Path, target: Path) -> None:
    """Rename a finished folder to where it belongs or a link leads; what is there goes. VllmEnvError where that cannot be."""
    target = target.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_tree(target) if target.is_dir() else target.unlink(missing_ok=True)
        made.rename(target)
    except OSError as error:
        raise VllmEnvError(f"{target} cannot be replaced: {error}.", remedy="Remove it, or the link that leads there.") from error


def link_or_copy(source: str, target: str) -> None:
    """Hard-link a file, or a link itself; copy it where that is not possible."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # no hard links here, or a file of another owner under fs.protected_hardlinks
        shutil.copy2(source, target, follow_symlinks=False)


def write_whole(file: Path, data: str | bytes) -> None:
    """Write a file, which appears whole or not at all, with mode and owner of what was there, else with its folder's owner.

    It is renamed into its place, because what was there may be a link to the user's file, or a hard link into a cache.
    """
    owner = owner_of(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as own:  # into which nobody else can plant a link
        temporary = Path(own) / file.name
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        if file.exists():
            temporary.chmod(stat.S_IMODE(file.stat().st_mode))
        give(temporary, owner)
        temporary.replace(file)


def let_read(path: Path) -> None:
    """Let every user read a file or enter a folder, whatever the umask: the server may be another user's."""
    mode = path.stat().st_mode
    path.chmod(stat.S_IMODE(mode) | (0o555 if mode & stat.S_IXUSR else 0o444))


def make_readable(folder: Path) -> None:
    """Let every user read a folder and all below it; links stay as they are."""
    for path in (p for p in (folder, *folder.rglob("*")) if not p.is_symlink()):
        let_read(path)


def sync(path: Path) -> None:
    """Write a file or a folder through to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_space(folder: Path, needed: int, purpose: str, remedy: str = SPACE_REMEDY) -> None:
    """Refuse early, with a VllmEnvError, a file system that has less than the ``needed`` bytes free for ``purpose``."""
    if (free := free_space(folder)) < needed:
        what = f"No space: {purpose} needs {needed / 1e9:.1f} GB in {folder}, and {free / 1e9:.1f} GB are free."
        raise VllmEnvError(what, remedy=remedy)


def free_space(folder: Path) -> int:
    """Return the bytes that are free on the file system of a folder, which need not exist yet."""
    return shutil.disk_usage(next(p for p in (folder, *folder.absolute().parents) if p.exists())).free


def nearest(path: Path) -> Path:
    """Return a file, folder or link itself if it exists, else the nearest folder above it."""
    while not os.path.lexists(path):  # not exists(), which raises where a folder above may not be entered
        path = path.absolute().parent
    return path


def is_writable(folder: Path) -> bool:
    """Tell whether this user may write into a folder, or may make it."""
    return os.access(nearest(folder), os.W_OK | os.X_OK)


def owner_of(place: Path) -> Owner:
    """Return the owner of a file or folder, of a link itself, or of the nearest folder above that exists."""
    return Owner(*nearest(place).lstat()[4:6])


def give(path: Path, owner: Owner) -> None:
    """Give what root has made to its owner; do nothing for another user, or to a file with several hard links.

    Such a file is the user's own, or the cache's archive, which root has verified and will place again: a user who could
    write it would change both.
    """
    status = path.lstat()
    linked = stat.S_ISREG(status.st_mode) and status.st_nlink > 1
    if os.geteuid() != 0 or status.st_uid != 0 or linked or owner == Owner(status.st_uid, status.st_gid):
        return
    with contextlib.suppress(OSError):  # a root that may not (root_squash), or a user whom this container does not know
        os.chown(path, owner.uid, owner.gid, follow_symlinks=False)


def give_tree(folder: Path, owner: Owner) -> None:
    """Give a file, or a folder and all that it holds, to one owner."""
    for path in (folder, *folder.rglob("*")):
        give(path, owner)


def give_as(copy: Path, original: Path) -> None:
    """Give a copy of a folder, and all that it holds, to the owners that the same things have in the original."""
    for path in (copy, *copy.rglob("*")):
        give(path, owner_of(original / path.relative_to(copy)))


def mounts_in(folder: Path) -> list[Path]:
    """Return the mount points at and below a folder, resolved.

    What lies in them is a volume of the user's, to be neither moved, copied nor removed. The kernel's list is read because
    os.path.ismount() compares st_dev, which a bind mount of the same file system shares with what is around it, and
    because a file can be a mount point too.
    """
    place = folder.resolve()
    points = [_unescaped(line.split(b" ")[4]) for line in _MOUNTINFO.read_bytes().strip().split(b"\n")]
    return [point for point in points if point.is_relative_to(place)]


def _unescaped(field: bytes) -> Path:
    """Undo the octal numbers in which proc(5) writes spaces, tabs, newlines and backslashes."""
    return Path(os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), field)))
