"""Files, folders, mount points and owners.

If root runs a build in a container, the files in a host user's folder must not belong to root
afterwards.
"""

import contextlib
import hashlib
import os
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
        # In parts, because an archive has several GB. Python 3.10 has no hashlib.file_digest().
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def tree_size(path: Path) -> int:
    """Return the size in bytes of a file, or of all files below a folder; 0 if it is missing."""
    files = [path]
    if path.is_dir():
        files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    size = 0
    for file in files:
        # Another process may remove it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            size += file.lstat().st_size
    return size


def remove_tree(path: Path) -> None:
    """Remove a folder with its contents, unless a volume is mounted in it."""
    # Removing it would empty the user's volume, and the mount point would still remain.
    if not mounts_in(path):
        shutil.rmtree(path, ignore_errors=True)


def put_in_place(made: Path, target: Path) -> None:
    """Rename a finished folder to ``target``; replace the old content.

    Raises:
        VllmEnvError: the old content cannot be replaced.
    """
    # A link at ``target`` is the user's, for example to another file system. It stays.
    target = target.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_tree(target) if target.is_dir() else target.unlink(missing_ok=True)
        made.rename(target)
    except OSError as error:
        raise VllmEnvError(
            f"{target} cannot be replaced: {error}.",
            remedy="Look at its permissions, at mounts in it, and at the link that leads there.",
        ) from error


def link_or_copy(source: str, target: str) -> None:
    """Hard-link a file or a symbolic link; copy it if hard links are not possible."""
    try:
        os.link(source, target, follow_symlinks=False)
    # Another file system, or fs.protected_hardlinks and a file of another owner.
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def write_whole(file: Path, data: str | bytes) -> None:
    """Write a file that appears completely or not at all.

    It keeps the mode and owner of the old file. A new file gets the owner of its folder.
    """
    owner = owner_of(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    # In a folder of its own no other user can plant a link, which would let root write anywhere.
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as folder:
        temporary = Path(folder, file.name)
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        if file.exists():
            temporary.chmod(stat.S_IMODE(file.stat().st_mode))
        give(temporary, owner)
        # Renamed, because the old one may be a hard link into a cache, or a link to a user's file.
        temporary.replace(file)


def let_read(path: Path) -> None:
    """Let every user read a file or enter a folder, whatever the umask."""
    # The server may run as another user than the build.
    mode = path.stat().st_mode
    path.chmod(stat.S_IMODE(mode) | (0o555 if mode & stat.S_IXUSR else 0o444))


def make_readable(folder: Path) -> None:
    """Let every user read a folder and everything below it; skip links."""
    for path in (folder, *folder.rglob("*")):
        # chmod follows links, and the target may be outside the folder.
        if not path.is_symlink():
            let_read(path)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_space(folder: Path, needed: int, purpose: str, remedy: str = SPACE_REMEDY) -> None:
    """Check that the file system of ``folder`` has ``needed`` bytes free for ``purpose``.

    Raises:
        VllmEnvError: it has fewer.
    """
    free = free_space(folder)
    if free < needed:
        raise VllmEnvError(
            f"No space: {purpose} needs {needed / 1e9:.1f} GB in {folder}, "
            f"and {free / 1e9:.1f} GB are free.",
            remedy=remedy,
        )


def free_space(folder: Path) -> int:
    """Return the free bytes of the file system of a folder, which need not exist yet."""
    # resolve() follows a link, because the space at its target counts.
    return shutil.disk_usage(nearest(folder.resolve())).free


def nearest(path: Path) -> Path:
    """Return the path if it exists (also as a broken link), else the nearest folder above it."""
    # Not exists(): it raises an error if this user may not enter a folder above.
    while not os.path.lexists(path):
        path = path.absolute().parent
    return path


def is_writable(folder: Path) -> bool:
    """Return whether this user may write into a folder, or create it."""
    return not why_not_writable(folder)


def require_writable(folder: Path, name: str) -> None:
    """Check that this user may write into a folder, or create it; leave nothing there.

    Raises:
        VllmEnvError: the user may not; the message calls the folder ``name``.
    """
    if why := why_not_writable(folder):
        raise VllmEnvError(
            f"{name} cannot be written: {why}.",
            remedy="Name another folder, or change its permissions.",
        )


def why_not_writable(folder: Path) -> str:
    """Return why this user cannot write into a folder, nor create it; "" if they can."""
    try:
        folder.lstat()
    # Missing, or a folder above it cannot be entered. The checks below find out what is the case.
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    # For example, the name is too long.
    except OSError as error:
        return str(error.strerror)
    place = nearest(folder)
    if not place.is_dir():
        return f"{place} is not a folder"
    # access(2) also fails on a read-only file system (EROFS), even for root.
    if not os.access(place, os.W_OK | os.X_OK):
        return f"no permission in {place}"
    try:
        # By access(2), root may write into /proc, where nothing can be created. So try it, unless
        # the folder itself is there: a server may watch its time, which a new file changes.
        if place != folder.absolute():
            # This file has no name that others could see.
            with tempfile.TemporaryFile(dir=place):
                pass
    except OSError as error:
        return f"{error.strerror} in {place}"
    return ""


def owner_of(place: Path) -> Owner:
    """Return the owner of a file, folder or link, or of the nearest existing folder above it."""
    status = nearest(place).lstat()
    return Owner(status.st_uid, status.st_gid)


def give(path: Path, owner: Owner) -> None:
    """Give a file that root made to ``owner``; do nothing if we are not root."""
    status = path.lstat()
    if os.geteuid() != 0 or status.st_uid != 0 or owner == (status.st_uid, status.st_gid):
        return
    # A file with several hard links is the user's own, or it is the cache's archive. Root has
    # verified that archive and will place it again: a user could change both by one of them.
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        return
    # A file system may refuse this even to root (root_squash), or not know the user.
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
    """Return the mount points at and below a folder, resolved; a file can be one, too.

    They are volumes of the user: do not move, copy or remove them.
    """
    place = folder.resolve()
    points = []
    # os.path.ismount() compares st_dev, which a bind mount shares with its own file system.
    # Not splitlines(): the kernel does not escape a carriage return in a name.
    for line in _MOUNTINFO.read_bytes().strip().split(b"\n"):
        # The fifth field of mountinfo is the mount point (proc(5)).
        _, _, _, _, field, *_ = line.split(b" ")
        # The kernel writes spaces, tabs, newlines and backslashes as octal escapes, which this
        # codec decodes. All other bytes pass through it as Latin-1.
        name = field.decode("unicode_escape").encode("latin-1")
        points.append(Path(os.fsdecode(name)))
    return [point for point in points if point.is_relative_to(place)]
