"""Owners of what a build places: root in a container leaves nothing of root's in a folder that is a host user's."""

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Owner:
    """User and group."""

    uid: int
    gid: int


def owner_of(place: Path) -> Owner:
    """Return the owner of a file or folder, of a link itself, or of the nearest folder above that exists."""
    while not os.path.lexists(place):
        place = place.absolute().parent
    status = place.lstat()
    return Owner(status.st_uid, status.st_gid)


def give(path: Path, owner: Owner) -> None:
    """Give what root has made to its owner; nothing happens for another user, or to a file with several hard links.

    Such a file is the person's own, who has it already, or the cache's archive, which root has verified and will place
    again: a person who could write it would change both.
    """
    status = path.lstat()
    if os.geteuid() != 0 or status.st_uid != 0 or owner == Owner(status.st_uid, status.st_gid):
        return
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        return
    with contextlib.suppress(OSError):  # a root that may not (root_squash), or a user whom this container does not know
        os.chown(path, owner.uid, owner.gid, follow_symlinks=False)


def give_tree(folder: Path, owner: Owner) -> None:
    """Give a file, or a folder and all that it holds, to one owner."""
    give(folder, owner)
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            give(Path(place, name), owner)


def give_as(copy: Path, original: Path) -> None:
    """Give a copy of a folder, and all that it holds, to the owners that the same things have in the original."""
    give(copy, owner_of(original))
    for place, folders, files in os.walk(copy):
        for path in (Path(place, name) for name in (*folders, *files)):
            give(path, owner_of(original / path.relative_to(copy)))
