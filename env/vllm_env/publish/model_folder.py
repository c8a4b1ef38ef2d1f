"""A model's folder: the built files, its code and configuration, and the user's own files.

This module writes three folders: the published one, its staged successor next to it, and the candidate. The smoke run
serves the candidate before anything is published. The candidate holds the files that tritonserver and ``1/model.py`` read.

It has no weights, adapters and caches, because the smoke run serves another model. In a container, the cache is on another
file system than the repository, so each of them would be copied.
"""

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base.filesystem import (
    Owner,
    give,
    give_as,
    give_tree,
    let_read,
    link_or_copy,
    mounts_in,
    owner_of,
    sync,
    write_whole,
)
from vllm_env.layout import LAYOUTS, files
from vllm_env.layout.layout import Layout
from vllm_env.model.files import CODE, CONFIG_NAME, ENGINE_ARGS_NAME, EXAMPLE_NAME, OFFICIAL_ARGS
from vllm_env.model.manifest import CACHE_NAME, MANIFEST_NAME, SBOM_NAME
from vllm_env.triton.root import STUB_NAME

from .exchange import STAGING, staging_in

# The order in which the files are renamed into place: the manifest last.
BUILT_NAMES = (STUB_NAME, *files(), SBOM_NAME, MANIFEST_NAME)
CODE_NAMES = ("model.py", "triton_vllm")
"""This project's own code in the version folder."""
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_BYTECODE = ("__pycache__", "*.pyc")
_NOT_READ = (*_BYTECODE, *(f"*{suffix}" for suffix in WEIGHTS))


@dataclass(frozen=True)
class BuiltSet:
    """The built files to place.

    Attributes:
        stub: the Python backend's stub.
        environment: the environment in the cache, in the form of its layout.
        layout: the layout.
        manifest: the manifest as JSON.
        sbom: the SBOM as JSON.
        adopted_from: the official backend's model folder if the model is adopted. The template is then made from it.
    """

    stub: Path
    environment: Path
    layout: Layout
    manifest: str
    sbom: str
    adopted_from: Path | None = None


def stage_model(built: BuiltSet, current: Path, template: Path, new: Path) -> None:
    """Complete ``new``, which already holds the built set, so that it can replace ``current``."""
    if current.exists():
        _link_tree(current, new)
    complete(built, template, new)
    set_environment_path(new, built.layout.environment, current)


def _link_tree(source: Path, target: Path) -> None:
    """Copy the folder ``source`` to ``target`` without the built files; its files become hard links."""

    def ignore(folder: str, names: list[str]) -> list[str]:
        return [
            n
            for n in names
            if Path(folder) == source and (n in BUILT_NAMES or n.startswith(STAGING))
        ]

    shutil.copytree(
        source, target, symlinks=True, ignore=ignore, copy_function=link_or_copy, dirs_exist_ok=True
    )
    shutil.copystat(source, target)
    give_as(target, source)


def complete(built: BuiltSet, template: Path, target: Path) -> None:
    """Complete a model's folder from ``template``. An adopted model always gets the current code."""
    with staging_in(target) as staging:
        missing = stage_missing(built, template, target, staging / "missing")
        place_missing(built, missing, target)


def stage_missing(built: BuiltSet, template: Path, target: Path, missing: Path) -> Path:
    """Make the new folder ``missing`` with the files that `complete` adds to ``target``, and return it.

    A folder without config.pbtxt is not a complete model; it gets all files of the template. An adopted model gets only the
    files that it lacks: the others are the user's. Placing the files later takes no more space.
    """
    missing.mkdir()
    adopted = built.adopted_from is not None
    if adopted:
        (missing / CODE).mkdir()
        _copy_own_code(template / CODE, missing / CODE)
    # not exists(): in a staged folder a relative link may lead nowhere
    if not os.path.lexists(target / CONFIG_NAME):
        ignore = _ignore_of_template(template, target, only_lacking=adopted)
        shutil.copytree(template, missing, ignore=ignore, dirs_exist_ok=True)
        shutil.copy2(template / CONFIG_NAME, missing / CONFIG_NAME)
        set_environment_path(missing, built.layout.environment)
        for folder in (missing, *(path for path in missing.rglob("*") if path.is_dir())):
            # The template's folders may be read-only, and the files are renamed out of their copies.
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | 0o700)
    if not _has_engine_args(target) and not _has_engine_args(missing):
        shutil.copyfile(template / EXAMPLE_NAME, missing / ENGINE_ARGS_NAME)
    return missing


# The returned function has the form that shutil.copytree() takes for ``ignore``.
def _ignore_of_template(
    template: Path,
    target: Path,
    *,
    only_lacking: bool,
) -> Callable[[str, list[str]], set[str]]:
    names_left = (*_BYTECODE, *BUILT_NAMES, CACHE_NAME, f"{STAGING}*", CONFIG_NAME)
    patterns = shutil.ignore_patterns(*names_left)
    volumes = mounts_in(template)
    kept = {Path(CODE, name) for name in CODE_NAMES}
    if _has_engine_args(
        target
    ):  # either file holds the engine arguments; if one exists, the other is not missing
        kept |= {Path(ENGINE_ARGS_NAME), Path(OFFICIAL_ARGS)}

    def is_kept(path: Path) -> bool:
        there = target / path.relative_to(template)
        merged = path.is_dir() and there.is_dir() and not there.is_symlink()
        return path.relative_to(template) in kept or (os.path.lexists(there) and not merged)

    def ignore(folder: str, names: list[str]) -> set[str]:
        paths = [Path(folder, name) for name in names]
        left = patterns(folder, names)
        left |= {path.name for path in paths if volumes and path.resolve() in volumes}
        return left | {path.name for path in paths if only_lacking and is_kept(path)}

    return ignore


def place_missing(built: BuiltSet, missing: Path, target: Path) -> None:
    """Move the files that `stage_missing` made into a model's folder; config.pbtxt, which marks a complete model, is last.

    Placed files belong to the folder's owner. In an adopted model, a file that not every user may read keeps its mode: the
    engine arguments may hold a token.
    """
    owner, adopted = owner_of(target), built.adopted_from is not None
    config = missing / CONFIG_NAME
    if adopted:
        _place_folder(missing / CODE, target / CODE, owner)
        _place_code(missing / CODE, target / CODE, missing.parent)
    if (
        config.exists()
    ):  # without a new configuration the modes of the folders are the user's choice
        let_read(target)
    for path in sorted(missing.rglob("*"), key=lambda path: (path == config, path)):
        place = target / path.relative_to(missing)
        if path.is_dir():
            _place_folder(path, place, owner)
            if config.exists():
                let_read(place)
            continue
        if not adopted:
            let_read(path)
        place.unlink(missing_ok=True)  # it may be a hard link to the user's file
        shutil.move(path, place)  # a folder of the model may be on another file system
        give(place, owner)


def _place_folder(made: Path, place: Path, owner: Owner) -> None:
    if not place.is_dir():
        place.mkdir()
        place.chmod(stat.S_IMODE(made.stat().st_mode))
        let_read(place)
        give(place, owner)


def replace_code(source: Path, model: Path) -> None:
    """Replace this project's code in a model's folder with the code of the version folder ``source``."""
    with staging_in(model) as staging:
        _copy_own_code(source, staging)
        _place_code(staging, model / CODE, staging)


def _copy_own_code(source: Path, folder: Path) -> None:
    for name in CODE_NAMES:
        if (source / name).is_dir():
            ignore = shutil.ignore_patterns(*_BYTECODE)
            shutil.copytree(source / name, folder / name, ignore=ignore)
        else:
            shutil.copy2(source / name, folder / name)


def _place_code(made: Path, version: Path, aside: Path) -> None:
    """Rename this project's code into place. The old code is only renamed: it may be a link to the user's files."""
    for name in CODE_NAMES:
        give_tree(made / name, owner_of(version))
        if os.path.lexists(version / name):
            (version / name).rename(aside / f"old-{name}")
        (made / name).rename(version / name)


def _replace(source: str, target: str) -> None:
    """Copy a file over another one, which may be a hard link to the user's file, or read-only."""
    Path(target).unlink(missing_ok=True)
    shutil.copy2(source, target)


def write_engine_args(template: Path, model: Path) -> None:
    """Write the example's engine arguments if a model has none of its own and none of the official backend's."""
    arguments = model / ENGINE_ARGS_NAME
    if not _has_engine_args(model):
        shutil.copyfile(template / EXAMPLE_NAME, arguments)
        let_read(arguments)
        give(arguments, owner_of(model))


def _has_engine_args(model: Path) -> bool:
    return os.path.lexists(model / ENGINE_ARGS_NAME) or (model / OFFICIAL_ARGS).exists()


def write_set(built: BuiltSet, folder: Path, *, linked: bool = False) -> None:
    """Write the built set into a folder; the files belong to the folder's owner.

    ``linked`` allows hard links in the environment. Use it only for a folder that no user will edit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(built.stub, folder / STUB_NAME)
    (folder / STUB_NAME).chmod(0o755)
    sync(folder / STUB_NAME)
    built.layout.place(built.environment, folder, linked=linked)
    for name, text in ((SBOM_NAME, built.sbom), (MANIFEST_NAME, built.manifest)):
        (folder / name).write_text(text, "utf-8")
        (folder / name).chmod(0o644)  # whatever the umask: the server may run as another user
        sync(folder / name)
    for name in BUILT_NAMES:
        if (folder / name).exists():
            give_tree(folder / name, owner_of(folder))


def set_environment_path(model: Path, name: str, current: Path | None = None) -> None:
    """Set EXECUTION_ENV_PATH to the layout's ``name``; write nothing if it is already set to it.

    ``current`` is the folder that ``model`` will replace. Its configuration is read if the one in ``model`` is a relative
    link, which leads nowhere from the staging folder.
    """
    config = model / CONFIG_NAME
    text = (config if config.exists() else (current or model) / CONFIG_NAME).read_text("utf-8")
    names = "|".join(sorted({re.escape(layout.environment) for layout in LAYOUTS.values()}))
    new = re.sub(
        rf"\$\$TRITON_MODEL_DIRECTORY/({names})(?=\")", f"$$TRITON_MODEL_DIRECTORY/{name}", text
    )
    if new != text:
        write_whole(config, new)


def stage_candidate(built: BuiltSet, current: Path, template: Path, new: Path) -> None:
    """Make ``new`` a model folder with the built files and the code and configuration that ``current`` will have.

    As in publishing, a model without ``config.pbtxt`` is completed from ``template``.
    """
    new.mkdir(parents=True)
    whole = (current / CONFIG_NAME).exists()
    codes = [current / CODE] if (current / CODE).is_dir() else []
    if not whole:  # an adopted model gets only the files that it lacks
        codes.insert(0 if built.adopted_from else len(codes), template / CODE)
    for code in codes:
        copy_code(code, new / CODE)
    shutil.copy2((current if whole else template) / CONFIG_NAME, new / CONFIG_NAME)
    if built.adopted_from:
        replace_code(template / CODE, new)
    write_set(built, new, linked=True)
    set_environment_path(new, built.layout.environment)


def copy_code(source: Path, target: Path) -> None:
    """Copy a version folder without bytecode, weights, volumes and linked folders of data. Other links are followed.

    A linked or mounted folder with Python files counts as code and is copied.
    """
    ignore = _ignore(mounts_in(source))
    shutil.copytree(source, target, ignore=ignore, dirs_exist_ok=True, copy_function=_replace)


def _ignore(volumes: list[Path]) -> Callable[[str, list[str]], Iterable[str]]:
    patterns = shutil.ignore_patterns(*_NOT_READ)

    def ignore(folder: str, names: list[str]) -> set[str]:
        paths = [Path(folder, name) for name in names]
        elsewhere = [p for p in paths if p.is_dir() and (p.is_symlink() or p.resolve() in volumes)]
        # copytree's ignore_dangling_symlinks would take every relative link as dangling.
        dangling = {p.name for p in paths if not p.exists()}
        return (
            patterns(folder, names)
            | dangling
            | {p.name for p in elsewhere if not any(p.glob("*.py"))}
        )

    return ignore
