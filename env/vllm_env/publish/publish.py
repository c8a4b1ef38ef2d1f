"""Place the built files in the model repository in one step that a crash cannot interrupt.

The new model folder is staged next to the repository, with links to the user's files and with
the new files. One renameat2(2) call then exchanges both folders, so a reader sees either the old
set or the new one.

In three cases the files are renamed one by one, the manifest last. The folder next to the
repository is on another file system. The file system cannot exchange folders. Or a volume is
mounted inside the model's folder: an exchange would move it away with the old folder.
"""
# Staging inside the repository is not possible: Triton takes every folder in it as a model, even
# hidden ones (seen with 24.10).

import contextlib
import os
from pathlib import Path

from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import (
    give,
    let_read,
    mounts_in,
    owner_of,
    remove_tree,
    require_space,
    require_writable,
    sync,
    tree_size,
)
from vllm_env.base.interrupts import interrupts_held
from vllm_env.base.workspace import Workspace
from vllm_env.layout.layouts import LAYOUT_FILES
from vllm_env.model.files import CONFIG_NAME
from vllm_env.model.manifest import MANIFEST_NAME
from vllm_env.triton.root import STUB_LIBRARIES, STUB_NAME

from .adopt import refuse_target
from .changes import refuse_changes, state_of
from .exchange import (
    STAGING_PREFIX,
    exchange,
    publishing,
    refuse_mounts,
    remove_abandoned_staging,
    staging_in,
)
from .model_config import set_count
from .model_folder import (
    BUILT_NAMES,
    BuiltSet,
    place_additions,
    set_environment_path,
    stage_additions,
    stage_model,
    write_set,
)


def check_writable(repository: Path, model: str) -> None:
    """Check early that a build will be able to write the model.

    Raises:
        VllmEnvError: the repository cannot be written, or a volume is mounted over built files.
    """
    require_writable(repository / model, f"--model-repository {repository}")
    refuse_mounts(repository / model, BUILT_NAMES)


def publish(
    workspace: Workspace, built: BuiltSet, repository: Path, model: str, template: Path
) -> Path:
    """Place a built set in ``repository/model`` and return that folder.

    A repository without the model gets one from ``template``. The user's files stay as they are.
    In ``config.pbtxt`` only EXECUTION_ENV_PATH changes if the layout changes, and the instances'
    count if the set has one.

    Raises:
        VllmEnvError: the repository cannot be written or is full. Or a volume is mounted over a
            file to replace. Or the folder is not free for an adopted model. In each case nothing
            has changed.
    """
    target = repository / model
    # The user may keep the model elsewhere and link to it. Place it there and keep the link.
    if target.is_symlink():
        target = target.resolve()
        repository = target.parent
    try:
        _make_folder(repository)
        with publishing(workspace, repository):
            # 1) Clean up, and check again: the build took minutes.
            remove_abandoned_staging(repository)
            refuse_mounts(target, BUILT_NAMES)
            if built.adopted_from:
                refuse_target(built.adopted_from, target)
            receiver = target if target.exists() else repository
            needed = built.layout.bytes_to_copy(built.environment, receiver)
            if built.stub_libraries:
                needed += tree_size(built.stub_libraries)
            require_space(receiver, needed, f"the environment in {target}")
            # 2) Place the files.
            place = staging_place(target)
            if place is None:
                _publish_in_place(built, target, template)
            else:
                _publish_by_exchange(built, target, template, place)
    except OSError as error:
        file = error.filename or target
        raise VllmEnvError(
            f"--model-repository {repository} cannot be written: {error.strerror} ({file}).",
            cause="The old files are unchanged.",
            remedy=(
                "Free space, change the permissions, "
                "or name another folder with --model-repository."
            ),
        ) from error
    return target


def _make_folder(folder: Path) -> None:
    """Make a folder and the missing ones above it, for the owner of the nearest existing one."""
    owner = owner_of(folder)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        let_read(path)
        give(path, owner)


def staging_place(target: Path) -> Path | None:
    """Return the folder above the repository if the model can be exchanged with a folder in it.

    Return None if it cannot.
    """
    repository = target.parent
    place = repository.absolute().parent
    # A mount point cannot be renamed, and an exchange would move volumes below the model's folder.
    if mounts_in(target) or repository.resolve() in mounts_in(repository):
        return None
    # Another process has a staging folder inside the model's folder, as --warm does for minutes.
    # An exchange would take it away with the old folder.
    if any(target.glob(f"{STAGING_PREFIX}*")):
        return None
    # Renaming needs one file system and write permission in both folders.
    if place.stat().st_dev != repository.stat().st_dev:
        return None
    are_writable = all(os.access(folder, os.W_OK | os.X_OK) for folder in (place, repository))
    return place if are_writable else None


def _publish_by_exchange(built: BuiltSet, target: Path, template: Path, place: Path) -> None:
    """Make the new model folder in a staging folder in ``place``, and exchange it with ``target``.

    Raises:
        VllmEnvError: a file of the user has changed meanwhile; nothing was replaced.
    """
    with staging_in(place) as staging:
        new = staging / target.name
        new.mkdir()
        let_read(new)
        give(new, owner_of(target))
        # This takes minutes for an unpacked environment. So the state of the user's files is noted
        # afterwards: an edit before then is copied like the other files.
        write_set(built, new)
        before = state_of(target)
        stage_model(built, target, template, new)
        sync(new)
        refuse_changes(target, new, before)
        if not target.exists():
            new.rename(target)
        # The file system may not support it. That is known only now.
        elif not exchange(new, target):
            _publish_in_place(built, target, template)
        sync(target.parent)


def _publish_in_place(built: BuiltSet, target: Path, template: Path) -> None:
    """Rename files from a staging folder inside the model's folder into place.

    If that fails, remove a new model.
    """
    old_content = set(target.iterdir()) if target.is_dir() else None
    _make_folder(target)
    placed: list[Path] = []
    try:
        with staging_in(target) as staging:
            # 1) Stage all files. From then on, nothing takes more space on the disk.
            give(staging, owner_of(target))
            write_set(built, staging)
            missing = stage_additions(built, template, target, staging / "missing")
            *others, manifest = BUILT_NAMES
            # Noted before they are placed: a failure may come in the middle.
            placed += [target / name for name in BUILT_NAMES]
            placed += [target / path.name for path in missing.iterdir()]
            # 2) Rename them: environment, code and arguments, config.pbtxt. A server that polls
            # must not see the configuration before the files that it names.
            for name in others:
                _place(staging / name, target / name)
            place_additions(built, missing, target)
            set_count(target, built.count)
            set_environment_path(target, built.layout.environment)
            # 3) Remove the files of another layout, and a stub that this set does not have. A small
            # archive next to another build's parts would not start.
            absent = [] if built.stub else [STUB_NAME, STUB_LIBRARIES]
            for name in {*LAYOUT_FILES, *absent}.difference(built.layout.files):
                _remove(target / name)
            # 4) The manifest makes the new set valid.
            _place(staging / manifest, target / manifest)
            sync(target)
    except BaseException:
        with interrupts_held():
            _remove_new_model(target, old_content, placed)
        raise


def _remove_new_model(target: Path, old_content: set[Path] | None, placed: list[Path]) -> None:
    """Remove the placed files if there was no model before.

    Args:
        target: the model's folder.
        old_content: what was in it before; None if the folder is new.
        placed: the files and folders that were placed, or were to be placed.
    """
    before = old_content or set()
    had_model = bool(before.intersection({target / CONFIG_NAME, target / MANIFEST_NAME}))
    if had_model:
        return
    # The configuration goes first, because a server may poll.
    for path in sorted(set(placed) - before, key=lambda path: path.name != CONFIG_NAME):
        with contextlib.suppress(OSError):
            _remove(path)
    if old_content is None:
        # The folder is not empty if another program has put a file there.
        with contextlib.suppress(OSError):
            target.rmdir()


def _place(staged: Path, place: Path) -> None:
    """Rename a staged file or folder into place; do nothing if it was not staged."""
    # rename() replaces a file, but no folder with contents.
    if staged.is_dir():
        remove_tree(place)
    # No layout has all files.
    if staged.exists():
        staged.rename(place)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)
