"""Place the built files in the model repository in one step that a crash cannot interrupt half-way.

The new model folder is staged next to the repository, with links to the user's files and with the new files. One
renameat2(2) call then exchanges both folders, so a reader sees either the old set or the new one. Staging inside the
repository is not possible: Triton takes every folder in it as a model, even hidden ones (seen with 24.10).

In three cases the files are renamed one by one, the manifest last. The folder next to the repository is on another file
system. The file system cannot exchange folders. Or a volume is mounted inside the model's folder: an exchange would move it
away with the old folder.
"""

import contextlib
import os
from pathlib import Path

from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import (
    give,
    let_read,
    mounts_in,
    nearest,
    owner_of,
    remove_tree,
    require_space,
    sync,
)
from vllm_env.base.interrupts import interrupts_held
from vllm_env.base.workspace import Workspace
from vllm_env.layout import files
from vllm_env.model.files import CONFIG_NAME
from vllm_env.model.manifest import MANIFEST_NAME

from .adopt import refuse_target
from .changes import refuse_changes, state_of
from .exchange import (
    STAGING,
    exchange,
    publishing,
    refuse_mounts,
    remove_abandoned_staging,
    staging_in,
)
from .model_folder import (
    BUILT_NAMES,
    BuiltSet,
    place_missing,
    set_environment_path,
    stage_missing,
    stage_model,
    write_set,
)


def check_writable(repository: Path, model: str) -> None:
    """Raise a VllmEnvError early if the repository cannot be written, or a volume is mounted over built files."""
    place = nearest(repository / model)
    if place.exists() and not place.is_dir():
        raise VllmEnvError(
            f"--model-repository {repository}: {place} is not a folder.", remedy="Name a folder."
        )
    if not os.access(place, os.W_OK | os.X_OK) or os.statvfs(place).f_flag & os.ST_RDONLY:
        raise VllmEnvError(
            f"--model-repository {repository} cannot be written: no permission in {place}.",
            remedy="Change its permissions, or take another folder.",
        )
    refuse_mounts(repository / model, BUILT_NAMES)


def publish(
    workspace: Workspace, built: BuiltSet, repository: Path, model: str, template: Path
) -> Path:
    """Place a built set in ``repository/model`` and return that folder.

    A repository without the model gets one from ``template``. The user's files stay as they are. Only EXECUTION_ENV_PATH in
    config.pbtxt changes if the layout changes.

    Raises:
        VllmEnvError: the repository cannot be written or is full. Or a volume is mounted over a file to replace. Or the
            folder is not free for an adopted model. In each case nothing has changed.
    """
    target = repository / model
    if target.is_symlink():  # the user keeps the model elsewhere: place it there and keep the link
        repository, target = target.resolve().parent, target.resolve()
    try:
        _make_folder(repository)
        with publishing(workspace, repository):
            remove_abandoned_staging(repository)
            refuse_mounts(target, BUILT_NAMES)
            if built.adopted_from:  # check again: the build took minutes
                refuse_target(built.adopted_from, target)
            receiver = target if target.exists() else repository
            needed = built.layout.bytes_to_copy(built.environment, receiver)
            require_space(receiver, needed, f"the environment in {target}")
            place = staging_place(target)
            if place is None:
                _publish_in_place(built, target, template)
            else:
                _publish_by_exchange(built, target, template, place)
    except OSError as error:
        raise VllmEnvError(
            f"--model-repository {repository} cannot be written: {error.strerror} ({error.filename or target}).",
            cause="What was there is as it was.",
            remedy="Free space, change the permissions, or name another folder with --model-repository.",
        ) from error
    return target


def _make_folder(folder: Path) -> None:
    """Make a folder and the missing ones above it; they belong to the owner of the nearest existing folder."""
    owner, missing = owner_of(folder), [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        let_read(made)
        give(made, owner)


def staging_place(target: Path) -> Path | None:
    """Return the folder that contains the repository if the model can be exchanged with a folder in it, else None.

    Return None also if another process has a staging folder inside the model's folder, as ``--warm`` does for minutes. An
    exchange would take it away with the old folder.
    """
    repository, parent = target.parent, target.parent.absolute().parent
    if (
        mounts_in(target)
        or repository.resolve() in mounts_in(repository)
        or any(target.glob(f"{STAGING}*"))
    ):
        return None
    same = parent.stat().st_dev == repository.stat().st_dev
    return (
        parent
        if same and all(os.access(f, os.W_OK | os.X_OK) for f in (parent, repository))
        else None
    )


def _publish_by_exchange(built: BuiltSet, target: Path, template: Path, place: Path) -> None:
    with staging_in(place) as staging:
        new = staging / target.name
        new.mkdir()
        let_read(new)
        give(new, owner_of(target))
        write_set(
            built, new
        )  # minutes for an unpacked environment; therefore note the user's files afterwards
        before = state_of(target, BUILT_NAMES)
        stage_model(built, target, template, new)
        sync(new)
        refuse_changes(target, new, before, BUILT_NAMES)
        if not target.exists():
            new.rename(target)
        elif not exchange(new, target):
            _publish_in_place(built, target, template)
        sync(target.parent)


def _publish_in_place(built: BuiltSet, target: Path, template: Path) -> None:
    """Rename files from a staging folder inside the model's folder into place; remove a new model if that fails.

    The order is: environment, code and arguments, config.pbtxt, manifest. A server that polls must not see the configuration
    before the files that it names.
    """
    there = set(target.iterdir()) if target.is_dir() else None
    _make_folder(target)
    placed: list[Path] = []
    try:
        with staging_in(target) as staging:
            give(staging, owner_of(target))
            write_set(built, staging)
            missing = stage_missing(built, template, target, staging / "missing")
            # From here on, nothing takes more space on the disk.
            placed += [target / path.name for path in missing.iterdir()]
            placed += [target / name for name in BUILT_NAMES]
            for name in BUILT_NAMES:
                if name != MANIFEST_NAME:
                    _place(staging / name, target / name)
            place_missing(built, missing, target)
            set_environment_path(target, built.layout.environment)
            for name in set(files()).difference(built.layout.files):
                _remove(target / name)
            _place(staging / MANIFEST_NAME, target / MANIFEST_NAME)
            sync(target)
    except BaseException:
        with interrupts_held():
            _remove_new_model(target, there, placed)
        raise


def _remove_new_model(target: Path, there: set[Path] | None, placed: list[Path]) -> None:
    """Remove the placed files if there was no model before. ``there`` is the folder's old content, None for a new folder."""
    before = there or set()
    if before.intersection({target / CONFIG_NAME, target / MANIFEST_NAME}):
        return
    # The configuration goes first, because a server may poll.
    for path in sorted(set(placed) - before, key=lambda path: path.name != CONFIG_NAME):
        with contextlib.suppress(OSError):
            _remove(path)
    if there is None:
        with contextlib.suppress(OSError):  # not empty: another program has put a file there
            target.rmdir()


# A missing file is skipped: no layout has all of them.
def _place(made: Path, place: Path) -> None:
    if made.is_dir():
        remove_tree(place)
    if made.exists():
        made.rename(place)


def _remove(path: Path) -> None:
    remove_tree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
