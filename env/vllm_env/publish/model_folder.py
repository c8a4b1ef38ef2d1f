"""A model's folder: the built files, its code and configuration, and the user's own files.

This module writes three folders: the published one, its staged successor next to it, and the
candidate. The smoke run serves the candidate before anything is published. The candidate holds
the files that tritonserver and ``1/model.py`` read.
"""
# The candidate has no weights, adapters and caches, because the smoke run serves another model.
# In a container, the cache is on another file system than the repository, so each of them would
# be copied.

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base.filesystem import (
    Owner,
    give,
    give_as,
    give_tree,
    let_read,
    link_or_copy,
    make_readable,
    mounts_in,
    owner_of,
    sync,
    write_whole,
)
from vllm_env.layout.layout import Layout
from vllm_env.layout.layouts import LAYOUT_FILES, LAYOUTS
from vllm_env.model.files import (
    CONFIG_NAME,
    ENGINE_ARGS_NAME,
    EXAMPLE_NAME,
    MODEL_DIRECTORY,
    OFFICIAL_ARGS_NAME,
    VERSION_FOLDER,
    encode_config,
    read_config_text,
)
from vllm_env.model.manifest import CACHE_NAME, MANIFEST_NAME
from vllm_env.model.sbom import SBOM_NAME
from vllm_env.triton.root import STUB_LIBRARIES, STUB_NAME

from .exchange import STAGING_PREFIX, staging_in
from .model_config import set_count

# The order in which the files are renamed into place. The manifest makes a set valid, so it is
# last.
BUILT_NAMES = (STUB_LIBRARIES, STUB_NAME, *LAYOUT_FILES, SBOM_NAME, MANIFEST_NAME)
CODE_NAMES = ("model.py", "node.py", "triton_vllm")
"""This project's own code in the version folder."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_BYTECODE = ("__pycache__", "*.pyc")
_NOT_READ = (*_BYTECODE, *(f"*{suffix}" for suffix in WEIGHT_SUFFIXES))

_Ignore = Callable[[str, list[str]], set[str]]
"""The form of ``ignore`` in shutil.copytree(): takes a folder and its names, returns some names."""


@dataclass(frozen=True)
class BuiltSet:
    """The built files to place.

    Attributes:
        stub: the Python backend's stub; None if the server's own is used.
        environment: the environment in the cache, in the form of its layout.
        layout: the layout.
        manifest: the manifest as JSON.
        sbom: the SBOM as JSON.
        adopted_from: the official backend's model folder if the model is adopted. The template is
            then made from it.
        stub_libraries: the folder that belongs next to the stub.
        count: the instances to write into the configuration; 0 leaves it as it is.
    """

    stub: Path | None
    environment: Path
    layout: Layout
    manifest: str
    sbom: str
    adopted_from: Path | None = None
    stub_libraries: Path | None = None
    count: int = 0


def stage_model(built: BuiltSet, current: Path, template: Path, new: Path) -> None:
    """Complete ``new``, which already holds the built set, so that it can replace ``current``."""
    if current.exists():
        _link_tree(current, new)
    with staging_in(new) as staging:
        missing = stage_additions(built, template, new, staging / "missing")
        place_additions(built, missing, new)
    set_environment_path(new, built.layout.environment, current)
    set_count(new, built.count, current)


def _link_tree(source: Path, target: Path) -> None:
    """Copy ``source`` to ``target`` without the built files; its files become hard links."""

    def ignore(folder: str, names: list[str]) -> list[str]:
        # Deeper down, a file with such a name is the user's.
        if Path(folder) != source:
            return []
        return [name for name in names if is_replaced(name)]

    shutil.copytree(
        source, target, symlinks=True, ignore=ignore, copy_function=link_or_copy, dirs_exist_ok=True
    )
    shutil.copystat(source, target)
    give_as(target, source)


def is_replaced(name: str) -> bool:
    """Return whether a build replaces the file or folder of this name in a model's folder."""
    return name in BUILT_NAMES or name.startswith(STAGING_PREFIX)


def stage_additions(built: BuiltSet, template: Path, target: Path, missing: Path) -> Path:
    """Put the files that ``target`` lacks into the new folder ``missing``, and return that folder.

    A folder without ``config.pbtxt`` is not a complete model. It gets all files of the template,
    which replace its own. A model that was adopted (made of a model for the official backend) keeps
    its own files.

    Every adopted model gets this project's current code. A model without engine arguments gets the
    template's example of them.
    """
    # Placing the staged files later takes no more space, so a full disk is noticed here.
    missing.mkdir()
    # 1) This project's code.
    adopted = built.adopted_from is not None
    if adopted:
        (missing / VERSION_FOLDER).mkdir()
        copy_own_code(template / VERSION_FOLDER, missing / VERSION_FOLDER)
    # 2) The template's files. Path.exists() is wrong here: in a staged folder a relative link may
    # lead nowhere.
    if not os.path.lexists(target / CONFIG_NAME):
        ignore = _ignore_of_template(template, target, only_lacking=adopted)
        shutil.copytree(template, missing, ignore=ignore, dirs_exist_ok=True)
        # A file that is a mount of its own has not been copied, but no model goes without this one.
        shutil.copy2(template / CONFIG_NAME, missing / CONFIG_NAME)
        set_environment_path(missing, built.layout.environment)
        set_count(missing, built.count)
        # The copied folders are read-only if the template's are. Later the files are moved out of
        # them.
        for path in (missing, *missing.rglob("*")):
            if path.is_dir():
                path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o700)
    # 3) The engine arguments.
    if not _has_engine_args(target) and not _has_engine_args(missing):
        shutil.copyfile(template / EXAMPLE_NAME, missing / ENGINE_ARGS_NAME)
    return missing


def _ignore_of_template(template: Path, target: Path, *, only_lacking: bool) -> _Ignore:
    """Return ``ignore`` to copy the template, or with ``only_lacking`` what ``target`` lacks."""
    # The template may be a model that was built and warmed itself. Its set and its caches belong
    # to another environment.
    patterns = shutil.ignore_patterns(*_BYTECODE, *BUILT_NAMES, CACHE_NAME, f"{STAGING_PREFIX}*")
    volumes = mounts_in(template)
    # This project's code is staged on its own.
    present = {Path(VERSION_FOLDER, name) for name in CODE_NAMES}
    # Either file holds the engine arguments. If one exists, the other is not missing: the model
    # refuses two that differ.
    if _has_engine_args(target):
        present |= {Path(ENGINE_ARGS_NAME), Path(OFFICIAL_ARGS_NAME)}

    def is_present(path: Path) -> bool:
        name = path.relative_to(template)
        counterpart = target / name
        # Two folders are merged. A folder that is a link now is the user's.
        are_merged = path.is_dir() and counterpart.is_dir() and not counterpart.is_symlink()
        return name in present or (os.path.lexists(counterpart) and not are_merged)

    def ignore(folder: str, names: list[str]) -> set[str]:
        left_out = patterns(folder, names)
        for path in (Path(folder, name) for name in names):
            is_volume = volumes and path.resolve() in volumes
            if is_volume or (only_lacking and is_present(path)):
                left_out.add(path.name)
        return left_out

    return ignore


def place_additions(built: BuiltSet, missing: Path, target: Path) -> None:
    """Move the files of ``stage_additions`` into a model's folder, ``config.pbtxt`` last.

    Placed files belong to the folder's owner.
    """
    owner = owner_of(target)
    adopted = built.adopted_from is not None
    config = missing / CONFIG_NAME
    # Without a new configuration the model was complete, and its modes are the user's choice.
    completes_model = config.exists()
    if adopted:
        _place_folder(missing / VERSION_FOLDER, target / VERSION_FOLDER, owner)
        _place_code(missing / VERSION_FOLDER, target / VERSION_FOLDER, aside=missing.parent)
    if completes_model:
        let_read(target)
    # config.pbtxt is last: it marks a complete model, and a server may poll.
    for path in sorted(missing.rglob("*"), key=lambda path: (path == config, path)):
        place = target / path.relative_to(missing)
        if path.is_dir():
            _place_folder(path, place, owner)
            if completes_model:
                let_read(place)
            continue
        # An adopted model's files keep their modes: the engine arguments may hold a token that
        # not every user may read.
        if not adopted:
            let_read(path)
        # The old file may be a hard link to the user's file. Its folder may be on another file
        # system, so rename() is not enough.
        place.unlink(missing_ok=True)
        shutil.move(path, place)
        give(place, owner)


def _place_folder(staged: Path, place: Path, owner: Owner) -> None:
    """Make the folder ``place`` if it is missing, with the mode of the staged one."""
    if not place.is_dir():
        place.mkdir()
        place.chmod(stat.S_IMODE(staged.stat().st_mode))
        let_read(place)
        give(place, owner)


def copy_own_code(source: Path, folder: Path) -> None:
    """Copy this project's code from the version folder ``source`` into a folder without it."""
    for program in ("model.py", "node.py"):
        shutil.copy2(source / program, folder / program)
    ignore = shutil.ignore_patterns(*_BYTECODE)
    shutil.copytree(source / "triton_vllm", folder / "triton_vllm", ignore=ignore)


def _place_code(staged: Path, version: Path, aside: Path) -> None:
    """Rename this project's code into place, and the old code into the folder ``aside``."""
    for name in CODE_NAMES:
        give_tree(staged / name, owner_of(version))
        # The old code is not deleted: it may be a link to the user's files.
        if os.path.lexists(version / name):
            (version / name).rename(aside / f"old-{name}")
        (staged / name).rename(version / name)


def write_engine_args(template: Path, model: Path) -> None:
    """Write the example's engine arguments if a model has none, here or in ``1/model.json``."""
    arguments = model / ENGINE_ARGS_NAME
    if not _has_engine_args(model):
        shutil.copyfile(template / EXAMPLE_NAME, arguments)
        let_read(arguments)
        give(arguments, owner_of(model))


def _has_engine_args(model: Path) -> bool:
    # Path.exists() is wrong here, too: see stage_additions().
    return any(os.path.lexists(model / name) for name in (ENGINE_ARGS_NAME, OFFICIAL_ARGS_NAME))


def write_set(built: BuiltSet, folder: Path, *, linked: bool = False) -> None:
    """Write the built set into a folder; the files belong to the folder's owner.

    ``linked`` allows hard links in the environment. Use it only for a folder that no user will
    edit: an edit would change the cache, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if built.stub:
        stub = folder / STUB_NAME
        shutil.copyfile(built.stub, stub)
        stub.chmod(0o755)
        sync(stub)
    if built.stub_libraries:
        libraries = folder / STUB_LIBRARIES
        shutil.copytree(built.stub_libraries, libraries)
        make_readable(libraries)
        for library in libraries.iterdir():
            sync(library)
    built.layout.place(built.environment, folder, linked=linked)
    for name, text in ((SBOM_NAME, built.sbom), (MANIFEST_NAME, built.manifest)):
        file = folder / name
        file.write_text(text, "utf-8")
        # Whatever the umask: the server may run as another user.
        file.chmod(0o644)
        sync(file)
    for name in BUILT_NAMES:
        if (folder / name).exists():
            give_tree(folder / name, owner_of(folder))


def set_environment_path(model: Path, name: str, current: Path | None = None) -> None:
    """Set EXECUTION_ENV_PATH to the layout's ``name``; write nothing if it is already set to it.

    Args:
        model: the model's folder.
        name: the environment's name in the folder.
        current: the folder that ``model`` will replace.
    """
    config = model / CONFIG_NAME
    # A configuration that is a relative link leads nowhere from the staging folder.
    readable = config if config.exists() or not current else current / CONFIG_NAME
    text = read_config_text(readable)
    new = with_environment_path(text, name)
    if new != text:
        write_whole(config, encode_config(new))


def with_environment_path(text: str, name: str) -> str:
    """Return a configuration's text with ``name`` as the environment, if it names a layout's."""
    # Only our own names are replaced. A path to another environment is the user's choice.
    names = "|".join(re.escape(layout.environment) for layout in LAYOUTS.values())
    pattern = rf'{re.escape(MODEL_DIRECTORY)}/({names})(?=")'
    return re.sub(pattern, f"{MODEL_DIRECTORY}/{name}", text)


def stage_candidate(built: BuiltSet, current: Path, template: Path, new: Path) -> None:
    """Make the folder ``new`` for the smoke run.

    It has the built files, and the code and configuration of ``current``. If ``current`` has no
    ``config.pbtxt``, the rest comes from ``template``, as in publishing.
    """
    new.mkdir(parents=True)
    is_complete = (current / CONFIG_NAME).exists()
    sources = [current]
    if not is_complete:
        # A file of the last source replaces those of the others. An adopted model keeps its own
        # files, and a new one gets the template's.
        sources = [template, current] if built.adopted_from else [current, template]
    for source in sources:
        if (source / VERSION_FOLDER).is_dir():
            copy_code(source / VERSION_FOLDER, new / VERSION_FOLDER)
    configured = current if is_complete else template
    shutil.copy2(configured / CONFIG_NAME, new / CONFIG_NAME)
    if built.adopted_from:
        # The old code is moved away and not overwritten. Otherwise modules that the new code does
        # not have would stay.
        with staging_in(new) as staging:
            copy_own_code(template / VERSION_FOLDER, staging)
            _place_code(staging, new / VERSION_FOLDER, aside=staging)
    write_set(built, new, linked=True)
    set_environment_path(new, built.layout.environment)
    set_count(new, built.count)


def copy_code(source: Path, target: Path) -> None:
    """Copy a version folder without bytecode, weights, and volumes and linked folders of data.

    A linked or mounted folder with Python files counts as code and is copied. Links are followed.
    """
    shutil.copytree(
        source,
        target,
        ignore=_ignore_of_code(mounts_in(source)),
        dirs_exist_ok=True,
        copy_function=_replace,
    )


def code_files(version: Path) -> Iterator[Path]:
    """Yield the files of a version folder that :func:`copy_code` copies."""
    ignore = _ignore_of_code(mounts_in(version))
    folders = [version]
    while folders:
        folder = folders.pop()
        names = [path.name for path in folder.iterdir()]
        for name in sorted(set(names) - ignore(str(folder), names)):
            path = folder / name
            if path.is_dir():
                folders.append(path)
            else:
                yield path


def _replace(source: str, target: str) -> None:
    """Copy a file over another one, which may be a hard link to the user's file, or read-only."""
    Path(target).unlink(missing_ok=True)
    shutil.copy2(source, target)


def _ignore_of_code(volumes: list[Path]) -> _Ignore:
    """Return ``ignore`` for :func:`copy_code`; ``volumes`` are mounted below the folder."""
    patterns = shutil.ignore_patterns(*_NOT_READ)

    def is_ignored(path: Path) -> bool:
        # A dangling link; copytree's ignore_dangling_symlinks would take relative ones, too.
        if not path.exists():
            return True
        # Data, unless there are Python files in it.
        is_elsewhere = path.is_dir() and (path.is_symlink() or path.resolve() in volumes)
        return is_elsewhere and not any(path.glob("*.py"))

    def ignore(folder: str, names: list[str]) -> set[str]:
        left_out = {name for name in names if is_ignored(Path(folder, name))}
        return left_out | patterns(folder, names)

    return ignore
