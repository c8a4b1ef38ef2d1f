"""Make the whole environment of a built model in a folder, such as for the workers of Ray."""

import contextlib
import shutil
from pathlib import Path

from vllm_env.base import report
from vllm_env.base.errors import UsageError
from vllm_env.base.filesystem import (
    give,
    give_tree,
    let_read,
    make_readable,
    owner_of,
    require_space,
    require_writable,
    tree_size,
)
from vllm_env.base.interrupts import interrupts_held
from vllm_env.base.locks import locked_folder, remove_unlocked
from vllm_env.model.manifest import Manifest, check_files
from vllm_env.plan import installed_triton

_SCRATCH = ".vllm_env."


def unpack(model: Path, manifest: Manifest, folder: Path) -> Path:
    """Unpack a model's environment into a folder that is missing or empty; return its path.

    The result is the same for every layout, and may be moved to any place on any machine.

    Raises:
        UsageError: the folder is not empty.
        VllmEnvError: a file differs from the manifest, or too little space is free.
    """
    folder = folder.absolute()
    # What a killed run has left. `clean` does not know this folder.
    for leftover in folder.glob(f"{_SCRATCH}*"):
        remove_unlocked(leftover)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder.", remedy="Name an empty or new folder.")
    require_writable(folder, str(folder))
    with report.stage("unpack"):
        report.step("digests")
        check_files(model, manifest)
        owner = owner_of(folder)
        existed = folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            # In the folder itself: it may be a mount point.
            with locked_folder(folder, _SCRATCH) as scratch:
                whole = _unpack_in(scratch, model, manifest)
                make_readable(whole)
                give_tree(whole, owner)
                _place(whole, folder)
        except BaseException:
            # What others have put there meanwhile stays.
            if not existed:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise
        # A folder that was there keeps its mode: it may belong to another user.
        if not existed:
            let_read(folder)
            give(folder, owner)
        report.step(str(folder))
    return folder


def _place(whole: Path, folder: Path) -> None:
    """Move all that an environment has into a folder, or nothing."""
    others = [path.name for path in folder.iterdir() if not path.name.startswith(_SCRATCH)]
    if others:
        raise UsageError(
            f"{folder} is no longer empty: somebody has put {others[0]} there.",
            remedy="Name another folder.",
        )
    with interrupts_held(), contextlib.ExitStack() as on_error:
        # bin/ is last: without it, an incomplete environment cannot be used.
        for path in sorted(whole.iterdir(), key=lambda path: path.name == "bin"):
            path.rename(folder / path.name)
            on_error.callback((folder / path.name).rename, path)
        on_error.pop_all()


def _unpack_in(scratch: Path, model: Path, manifest: Manifest) -> Path:
    layout, packed = manifest.packed(model)
    *_, tree = layout.open(packed, installed_triton(), scratch)
    if tree.path.is_relative_to(scratch):
        return tree.path
    # The layout "directory" unpacks nothing. The model keeps its folder.
    require_space(scratch, tree_size(tree.path), "copying the environment")
    copy = scratch / "copy"
    shutil.copytree(tree.path, copy, symlinks=True)
    return copy
