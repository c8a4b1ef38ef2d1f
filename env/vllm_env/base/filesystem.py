"""Files, folders, mount points and owners.

If root runs a build in a container, the files in a host user's folder must not belong to root afterwards.
"""

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
    """User and group as numbers."""

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
    """Return the size in bytes of a file or of all files below a folder; a missing file counts as 0."""
    below = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    size = 0
    for file in below if path.is_dir() else (path,):
        with contextlib.suppress(FileNotFoundError):
            size += file.lstat().st_size
    return size


def remove_tree(path: Path) -> None:
    """Remove a folder with its contents; do nothing if it does not exist or a volume is mounted in it.

    Removing it would empty the user's volume, and the mount point would still remain.
    """
    if not mounts_in(path):
        shutil.rmtree(path, ignore_errors=True)


def put_in_place(made: Path, target: Path) -> None:
    """Rename a finished folder to ``target``, or to the place that a link at ``target`` names; replace the old content.

    Raises:
        VllmEnvError: the old content cannot be replaced.
    """
    target = target.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_tree(target) if target.is_dir() else target.unlink(missing_ok=True)
        made.rename(target)
    except OSError as error:
        raise VllmEnvError(
            f"{target} cannot be replaced: {error}.",
            remedy="Remove it, or the link that leads there.",
        ) from error


def link_or_copy(source: str, target: str) -> None:
    """Hard-link a file or a symbolic link; copy it if hard links are not possible."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # no hard links here, or fs.protected_hardlinks and a file of another owner
        shutil.copy2(source, target, follow_symlinks=False)


def write_whole(file: Path, data: str | bytes) -> None:
    """Write a file that appears completely or not at all, and keep the mode and owner of the old file.

    A new file gets the owner of its folder. The file is renamed into place, because the old one may be a link to the user's
    file, or a hard link into a cache.
    """
    owner = owner_of(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    # In a folder of its own, no other user can plant a link.
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as own:
        temporary = Path(own) / file.name
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        if file.exists():
            temporary.chmod(stat.S_IMODE(file.stat().st_mode))
        give(temporary, owner)
        temporary.replace(file)


def let_read(path: Path) -> None:
    """Let every user read a file or enter a folder, whatever the umask: the server may run as another user."""
    mode = path.stat().st_mode
    path.chmod(stat.S_IMODE(mode) | (0o555 if mode & stat.S_IXUSR else 0o444))


def make_readable(folder: Path) -> None:
    """Let every user read a folder and everything below it; skip links."""
    for path in (p for p in (folder, *folder.rglob("*")) if not p.is_symlink()):
        let_read(path)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_space(folder: Path, needed: int, purpose: str, remedy: str = SPACE_REMEDY) -> None:
    """Raise a VllmEnvError if the file system of ``folder`` has fewer than ``needed`` bytes free for ``purpose``."""
    if (free := free_space(folder)) < needed:
        what = f"No space: {purpose} needs {needed / 1e9:.1f} GB in {folder}, and {free / 1e9:.1f} GB are free."
        raise VllmEnvError(what, remedy=remedy)


def free_space(folder: Path) -> int:
    """Return the free bytes of the file system of a folder, which need not exist yet."""
    return shutil.disk_usage(
        next(p for p in (folder, *folder.absolute().parents) if p.exists())
    ).free


def nearest(path: Path) -> Path:
    """Return the path if it exists (also as a broken link), else the nearest folder above it."""
    while not os.path.lexists(path):  # not exists(): it raises if a folder above may not be entered
        path = path.absolute().parent
    return path


def is_writable(folder: Path) -> bool:
    """Return whether this user may write into a folder, or create it."""
    return os.access(nearest(folder), os.W_OK | os.X_OK)


def owner_of(place: Path) -> Owner:
    """Return the owner of a file, folder or link, or of the nearest existing folder above it."""
    return Owner(*nearest(place).lstat()[4:6])


def give(path: Path, owner: Owner) -> None:
    """Give a file that root made to ``owner``; do nothing if we are not root, or if the file has several hard links.

    A file with several hard links is the user's own, or it is the cache's archive. Root has verified that archive and will
    place it again: a user who could write one copy would change both.
    """
    status = path.lstat()
    linked = stat.S_ISREG(status.st_mode) and status.st_nlink > 1
    if (
        os.geteuid() != 0
        or status.st_uid != 0
        or linked
        or owner == Owner(status.st_uid, status.st_gid)
    ):
        return
    # Root may not (root_squash), or the container does not know the user.
    with contextlib.suppress(OSError):
        os.chown(path, owner.uid, owner.gid, follow_symlinks=False)


def give_tree(folder: Path, owner: Owner) -> None:
    """Give a file, or a folder with its contents, to one owner."""
    for path in (folder, *folder.rglob("*")):
        give(path, owner)


def give_as(copy: Path, original: Path) -> None:
    """Give each file of a copied folder to the owner of the same file in the original."""
    for path in (copy, *copy.rglob("*")):
        give(path, owner_of(original / path.relative_to(copy)))


def mounts_in(folder: Path) -> list[Path]:
    """Return the mount points at and below a folder, resolved.

    They are volumes of the user: do not move, copy or remove them. The function reads the kernel's list because
    os.path.ismount() compares st_dev. A bind mount from the same file system has the same st_dev as its surroundings.
    A file can be a mount point, too.
    """
    place = folder.resolve()
    points = [
        _unescaped(line.split(b" ")[4]) for line in _MOUNTINFO.read_bytes().strip().split(b"\n")
    ]
    return [point for point in points if point.is_relative_to(place)]


def _unescaped(field: bytes) -> Path:
    """Decode the octal escapes that proc(5) uses for spaces, tabs, newlines and backslashes."""
    return Path(
        os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), field))
    )
