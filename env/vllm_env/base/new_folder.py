"""Fill a folder that a user names for a result: completely, or not at all.

The contents are made in a scratch folder inside it, because the folder may be a mount point. They
are renamed into place at the end.
"""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from .errors import UsageError, VllmEnvError
from .filesystem import (
    give,
    give_tree,
    let_read,
    make_readable,
    owner_of,
    remove_tree,
    require_writable,
)
from .interrupts import interrupts_held
from .locks import locked_folder, remove_unlocked

_SCRATCH = ".vllm_env."
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The folder of the contents in the scratch folder.
_MADE = "made"
# A file next to it. It shows that the contents are being moved into the user's folder.
_PLACING = "placing"


def prepare(folder: Path, last: str) -> None:
    """Check that a folder can be filled, and remove what a killed run has left in it.

    Args:
        folder: the folder. It must be missing or empty.
        last: as for :func:`filled`.

    Raises:
        UsageError: the folder is not empty.
        VllmEnvError: it cannot be written.
    """
    # Only this removes them: `clean` does not know the user's folder.
    for leftover in folder.glob(f"{_SCRATCH}*"):
        was_placing = (leftover / _PLACING).exists()
        # A run was killed while it moved the contents: what is there is only a part of them. Look
        # for ``last`` after the lock is free, because a run that ends well moves it until then.
        if remove_unlocked(leftover) and was_placing and not (folder / last).exists():
            for path in _others(folder):
                remove_tree(path) if path.is_dir() else path.unlink()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder.", remedy="Name an empty or new folder.")
    require_writable(folder, str(folder))


@contextlib.contextmanager
def filled(folder: Path, last: str) -> Iterator[tuple[Path, Path]]:
    """Yield two new folders: one to make the contents in, and one for scratch files.

    If the block ends well, the contents are moved into ``folder``, and belong to its owner.

    Args:
        folder: a folder that :func:`prepare` has checked.
        last: the name that is moved last. Without it, the contents are unusable.

    Raises:
        UsageError: another program has put a file into the folder meanwhile.
        VllmEnvError: the file system is full.
    """
    owner = owner_of(folder)
    existed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked_folder(folder, _SCRATCH) as scratch:
            made = scratch / _MADE
            rest = scratch / "scratch"
            rest.mkdir()
            yield made, rest
            make_readable(made)
            give_tree(made, owner)
            _place(made, folder, last)
    except BaseException as error:
        # What others have put there meanwhile stays.
        if not existed:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError) and error.errno in _FULL:
            raise VllmEnvError(
                f"{folder} cannot be filled: {error.strerror}.",
                remedy="Free some space, or name a folder on another file system.",
            ) from error
        raise
    # A folder that was there keeps its mode: it may belong to another user.
    if not existed:
        let_read(folder)
        give(folder, owner)


def _place(made: Path, folder: Path, last: str) -> None:
    """Move all contents into the folder, or nothing.

    Args:
        made: the folder with the contents.
        folder: the user's folder.
        last: the name that is moved last.

    Raises:
        UsageError: the folder is no longer empty.
    """
    if others := _others(folder):
        raise UsageError(
            f"{folder} is no longer empty: somebody has put {others[0].name} there.",
            remedy="Name another folder.",
        )
    with interrupts_held(), contextlib.ExitStack() as on_error:
        (made.parent / _PLACING).touch()
        # False sorts before True, so ``last`` comes last.
        for path in sorted(made.iterdir(), key=lambda path: path.name == last):
            path.rename(folder / path.name)
            # If a later one cannot be moved, this one is moved back.
            on_error.callback((folder / path.name).rename, path)
        on_error.pop_all()


def _others(folder: Path) -> list[Path]:
    """Return what is in a folder besides the scratch folders of this program."""
    return [path for path in folder.iterdir() if not path.name.startswith(_SCRATCH)]
