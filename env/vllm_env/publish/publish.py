"""Places what was built in the model repository, as one step that no crash can tear.

The new model folder is staged beside the repository: links to what the person has there, and the new files. Then both
folders are exchanged by one renameat2(2) call, so that a reader sees the old set or the new. Staging inside the repository
is not possible, because Triton takes every folder in it for a model, hidden ones too (seen with 24.10). Where the folder
beside it is on another file system, or the file system cannot exchange, the files are renamed one by one, the manifest
last; and so where a volume is mounted inside the model's folder, because the volume would go with the old folder.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_env.base import cache
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.mounts import mounts_in
from vllm_env.base.ownership import give, give_as, give_tree, owner_of
from vllm_env.serve.warm import CACHE_NAME
from vllm_env.triton.root import STUB_NAME

from .exchange import STAGING, exchange, remove_abandoned_staging, staging_in
from .manifest import ARCHIVE_NAME, DIRECTORY_NAME, MANIFEST_NAME, SBOM_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

BUILT_NAMES = (STUB_NAME, ARCHIVE_NAME, DIRECTORY_NAME, SBOM_NAME, MANIFEST_NAME)  # in the order of renaming
CONFIG_NAME = "config.pbtxt"


@dataclass(frozen=True)
class BuiltSet:
    """What is to be placed: the stub, the archive or the unpacked environment, the manifest's and the SBOM's text."""

    stub: Path
    environment: Path
    layout: str
    manifest: str
    sbom: str

    @property
    def environment_name(self) -> str:
        """The environment's name in the model's folder."""
        return ARCHIVE_NAME if self.layout == "archive" else DIRECTORY_NAME


def check_writable(repository: Path, model: str) -> None:
    """Refuse early a repository that cannot be written.

    Raises:
        VllmEnvError: the folder cannot be created or written, or is no folder, or a volume is mounted over what is built.
    """
    place = repository / model
    while not os.path.lexists(place):  # not exists(), which raises where a folder above may not be entered
        place = place.parent
    if place.exists() and not place.is_dir():
        raise VllmEnvError(f"--model-repository {repository}: {place} is not a folder.", remedy="Name a folder.")
    if not os.access(place, os.W_OK | os.X_OK) or os.statvfs(place).f_flag & os.ST_RDONLY:
        raise VllmEnvError(
            f"--model-repository {repository} cannot be written: no permission in {place}.",
            remedy="Change its permissions, or name another folder with --model-repository.",
        )
    _refuse_mounts(repository / model, BUILT_NAMES)


def _refuse_mounts(target: Path, names: tuple[str, ...]) -> None:
    """Refuse what can be neither replaced nor removed without emptying somebody's volume."""
    for point in (p for name in names for p in mounts_in(target / name)):
        raise VllmEnvError(
            f"{target} cannot be built anew: {point} is a mount point.",
            cause="A build replaces what lies there, and would remove what the mounted volume holds.",
            remedy=f"Take the mount away (umount {point}, or leave out its -v or --mount), or name another --model.",
        )


def publish(
    built: BuiltSet, repository: Path, model: str, template: Path, waiting: Callable[[], None] = lambda: None
) -> Path:
    """Place a built set in ``repository/model`` and return that folder.

    A repository without the model gets one from ``template``. What the person keeps there stays as it is, except
    EXECUTION_ENV_PATH in config.pbtxt when the layout changes.

    Raises:
        VllmEnvError: the repository cannot be written, its file system is full, or a volume is mounted over what is
            to be replaced; it is as it was then.
    """
    target = repository / model
    if target.is_symlink():  # the person keeps the model elsewhere: it is placed there, and the link stays
        repository, target = target.resolve().parent, target.resolve()
    try:
        _make_folder(repository)
        with cache.filelock_of(repository, waiting):
            remove_abandoned_staging(repository)
            _refuse_mounts(target, BUILT_NAMES)
            receiver = target if target.exists() else repository
            cache.require_space(receiver, _bytes_to_copy(built, receiver), f"the environment in {target}")
            place = _staging_place(target)
            if place is None:
                _publish_in_place(built, target, template)
            else:
                _publish_by_exchange(built, target, template, place)
    except KeyboardInterrupt:
        remove_abandoned_staging(repository)  # it may have hit the very code that does so
        raise
    except OSError as error:
        raise VllmEnvError(
            f"--model-repository {repository} cannot be written: {error.strerror} ({error.filename or target}).",
            cause="What was there is as it was.",
            remedy="Free space, change the permissions, or name another folder with --model-repository.",
        ) from error
    return target


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, which belong to the owner of what was there."""
    owner, missing = owner_of(folder), [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        give(made, owner)


def _bytes_to_copy(built: BuiltSet, receiver: Path) -> int:
    """Return what the receiving folder's file system must take; an archive is linked where it is the cache's."""
    linked = built.layout == "archive" and built.environment.stat().st_dev == receiver.stat().st_dev
    return 0 if linked else cache.tree_size(built.environment)


def _staging_place(target: Path) -> Path | None:
    """Return the folder beside the repository if the model's folder can be exchanged with one there, else None.

    What another process stages inside the model's folder, as --warm does for minutes, would go with the old one.
    """
    repository, parent = target.parent, target.parent.absolute().parent
    if mounts_in(target) or repository.resolve() in mounts_in(repository) or any(target.glob(f"{STAGING}*")):
        return None
    same = parent.stat().st_dev == repository.stat().st_dev
    return parent if same and all(os.access(f, os.W_OK | os.X_OK) for f in (parent, repository)) else None


def _publish_by_exchange(built: BuiltSet, target: Path, template: Path, place: Path) -> None:
    with staging_in(place) as staging:
        new = staging / target.name
        if not target.exists():
            new.mkdir()
            give(new, owner_of(target))
        _stage_model(built, target, template, new)
        _sync_folder(new)
        if not target.exists():
            new.rename(target)
        elif not exchange(new, target):
            _publish_in_place(built, target, template)
        _sync_folder(target.parent)


def _stage_model(built: BuiltSet, current: Path, template: Path, new: Path) -> None:
    """Make ``new`` what ``current`` will be once the set is published."""
    if current.exists():
        _link_tree(current, new)
    _copy_template(template, new)
    write_set(built, new)
    set_environment_path(new, built.environment_name)


def _publish_in_place(built: BuiltSet, target: Path, template: Path) -> None:
    _make_folder(target)
    _copy_template(template, target)
    with staging_in(target) as staging:
        give(staging, owner_of(target))
        write_set(built, staging)
        set_environment_path(target, built.environment_name)
        for name in BUILT_NAMES:
            if (staging / name).is_dir():
                cache.remove_tree(target / name)
            if (staging / name).exists():
                (staging / name).rename(target / name)
        _remove_other_layout(built, target)
        _sync_folder(target)


def _link_tree(source: Path, target: Path) -> None:
    """Make ``target`` a copy of the folder ``source`` without what was built, its files as hard links."""
    skip = {*BUILT_NAMES}

    def ignore(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if Path(folder) == source and (n in skip or n.startswith(STAGING))]

    shutil.copytree(source, target, symlinks=True, ignore=ignore, copy_function=link_or_copy)
    shutil.copystat(source, target)
    give_as(target, source)


def link_or_copy(source: str, target: str) -> None:
    """Hard-link a file, or a link itself; copy it where that is not possible."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # no hard links here, or a file of another owner under fs.protected_hardlinks
        shutil.copy2(source, target, follow_symlinks=False)


def _copy_template(template: Path, target: Path) -> None:
    """Complete a model's folder that has no config.pbtxt, the mark of a whole one, which is copied last.

    What is copied belongs to the folder's owner.
    """
    if (target / CONFIG_NAME).exists():
        return
    patterns = shutil.ignore_patterns("__pycache__", "*.pyc", *BUILT_NAMES, CACHE_NAME, f"{STAGING}*", CONFIG_NAME)
    volumes = mounts_in(template)
    copied = [target / CONFIG_NAME]

    def ignore(folder: str, names: list[str]) -> set[str]:
        left = patterns(folder, names) | {n for n in names if volumes and Path(folder, n).resolve() in volumes}
        copied.extend(target / Path(folder, n).relative_to(template) for n in names if n not in left)
        return left

    shutil.copytree(template, target, ignore=ignore, dirs_exist_ok=True)
    shutil.copy2(template / CONFIG_NAME, target / CONFIG_NAME)
    for path in copied:
        give(path, owner_of(target))


def write_set(built: BuiltSet, folder: Path, *, linked: bool = False) -> None:
    """Write the set into a folder; it belongs to the folder's owner.

    ``linked`` makes the files of an unpacked environment hard links, for a folder that nobody will edit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(built.stub, folder / STUB_NAME)
    (folder / STUB_NAME).chmod(0o755)
    environment = folder / built.environment_name
    if built.layout == "archive":
        link_or_copy(str(built.environment), str(environment))
    else:  # a copy, not links: a person may edit what lies there, and the cache must not change with it
        copy = link_or_copy if linked else shutil.copy2
        shutil.copytree(built.environment, environment, symlinks=True, copy_function=copy)
    (folder / SBOM_NAME).write_text(built.sbom, "utf-8")
    (folder / MANIFEST_NAME).write_text(built.manifest, "utf-8")
    for file in folder.iterdir():
        if file.is_file() and file.name in BUILT_NAMES:
            if file.name != STUB_NAME:
                file.chmod(0o644)  # whatever the umask: the server may be another user's
            _sync(file)
    for name in BUILT_NAMES:
        if (folder / name).exists():
            give_tree(folder / name, owner_of(folder))


def _remove_other_layout(built: BuiltSet, target: Path) -> None:
    other = target / (DIRECTORY_NAME if built.layout == "archive" else ARCHIVE_NAME)
    cache.remove_tree(other) if other.is_dir() else other.unlink(missing_ok=True)


def set_environment_path(model: Path, name: str) -> None:
    """Point EXECUTION_ENV_PATH to the layout's name; nothing is written when it already does."""
    config = model / CONFIG_NAME
    text = config.read_text("utf-8")
    new = re.sub(
        rf"\$\$TRITON_MODEL_DIRECTORY/({ARCHIVE_NAME}|{DIRECTORY_NAME})(?=\")", f"$$TRITON_MODEL_DIRECTORY/{name}", text
    )
    if new != text:
        temporary = model / ".config.pbtxt.new"  # not in place: it may be a link to the person's file
        temporary.write_text(new, "utf-8")
        temporary.chmod(stat.S_IMODE(config.stat().st_mode))
        give(temporary, owner_of(config))
        temporary.replace(config)


def _sync(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_sync_folder = _sync
