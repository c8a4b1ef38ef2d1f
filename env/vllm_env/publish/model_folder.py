"""A model's folder: what was built for it, its code and configuration, and what the user keeps there.

Three folders are written: the published one, one staged beside it, and the candidate that the smoke run serves before
anything is published. The candidate holds what tritonserver and ``1/model.py`` read. Weights, adapters and caches stay
where they are: the smoke run serves another model, and in a container the cache is on another file system than the
repository, where each would be a copy.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base.filesystem import (
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
from vllm_env.layout import FILES, LAYOUTS
from vllm_env.layout.layout import Layout
from vllm_env.model.files import CODE, CONFIG_NAME, ENGINE_ARGS_NAME, EXAMPLE_NAME
from vllm_env.model.manifest import CACHE_NAME, MANIFEST_NAME, SBOM_NAME
from vllm_env.triton.root import STUB_NAME

from .exchange import STAGING, staging_in

BUILT_NAMES = (STUB_NAME, *FILES, SBOM_NAME, MANIFEST_NAME)  # in the order of renaming
CODE_NAMES = ("model.py", "triton_vllm")
"""This project's own code in the version folder."""
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_NOT_READ = ("__pycache__", "*.pyc", *(f"*{suffix}" for suffix in WEIGHTS))


@dataclass(frozen=True)
class BuiltSet:
    """What to place: the stub, the environment as its layout has it in the cache, and manifest and SBOM as JSON.

    ``adopted_from`` is the official backend's model folder, if this model is adopted; the template is then made from it.
    """

    stub: Path
    environment: Path
    layout: Layout
    manifest: str
    sbom: str
    adopted_from: Path | None = None


def stage_model(built: BuiltSet, current: Path, template: Path, new: Path) -> None:
    """Make ``new``, which holds the set already, what ``current`` will be once it is published."""
    if current.exists():
        _link_tree(current, new)
    complete(built, template, new)
    write_engine_args(template, new)
    set_environment_path(new, built.layout.environment, current)


def _link_tree(source: Path, target: Path) -> None:
    """Make ``target`` a copy of the folder ``source`` without what was built, its files as hard links."""

    def ignore(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if Path(folder) == source and (n in BUILT_NAMES or n.startswith(STAGING))]

    shutil.copytree(source, target, symlinks=True, ignore=ignore, copy_function=link_or_copy, dirs_exist_ok=True)
    shutil.copystat(source, target)
    give_as(target, source)


def complete(built: BuiltSet, template: Path, target: Path) -> None:
    """Complete a model's folder from ``template``; an adopted model that is whole gets its code again."""
    if built.adopted_from and os.path.lexists(target / CONFIG_NAME):
        replace_code(template / CODE, target)
    complete_from(template, target, keep_modes=built.adopted_from is not None)


def replace_code(source: Path, model: Path) -> None:
    """Replace this project's code in a model's folder by that in the version folder ``source``.

    It is renamed into its place: what is there may be a link, or a hard link to the user's file.
    """
    with staging_in(model) as staging:
        for name in CODE_NAMES:
            made = staging / name
            place = model / CODE / name
            if (source / name).is_dir():
                shutil.copytree(source / name, made, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
            else:
                shutil.copy2(source / name, made)
            give_tree(made, owner_of(model / CODE))
            if os.path.lexists(place):
                place.rename(staging / f"old-{name}")
            made.rename(place)


def complete_from(template: Path, target: Path, *, keep_modes: bool = False) -> None:
    """Complete a model's folder that has no config.pbtxt, the mark of a whole one, which is copied last.

    What is copied belongs to the folder's owner. With ``keep_modes`` a file that not everybody may read stays so: an adopted
    model's engine arguments may hold a token.
    """
    if os.path.lexists(target / CONFIG_NAME):  # in a staged folder a relative link may lead nowhere
        return
    patterns = shutil.ignore_patterns("__pycache__", "*.pyc", *BUILT_NAMES, CACHE_NAME, f"{STAGING}*", CONFIG_NAME)
    volumes = mounts_in(template)
    copied = [target / CONFIG_NAME]

    def ignore(folder: str, names: list[str]) -> set[str]:
        left = patterns(folder, names) | {n for n in names if volumes and Path(folder, n).resolve() in volumes}
        copied.extend(target / Path(folder, n).relative_to(template) for n in names if n not in left)
        return left

    shutil.copytree(template, target, ignore=ignore, dirs_exist_ok=True, copy_function=_replace)
    shutil.copy2(template / CONFIG_NAME, target / CONFIG_NAME)
    let_read(target)
    for path in copied:
        if path.is_dir() or not keep_modes:
            let_read(path)
        give(path, owner_of(target))


def _replace(source: str, target: str) -> None:
    """Copy a file over another one, which may be a hard link to the user's."""
    Path(target).unlink(missing_ok=True)
    shutil.copy2(source, target)


def write_engine_args(template: Path, model: Path) -> None:
    """Give a model the example's engine arguments if it has none, nor the official backend's; then they are the user's."""
    arguments, official = model / ENGINE_ARGS_NAME, model / CODE / "model.json"
    if not os.path.lexists(arguments) and not official.exists():
        shutil.copyfile(template / EXAMPLE_NAME, arguments)
        let_read(arguments)
        give(arguments, owner_of(model))


def write_set(built: BuiltSet, folder: Path, *, linked: bool = False) -> None:
    """Write the set into a folder; it belongs to the folder's owner.

    ``linked`` allows hard links in the environment, for a folder that nobody will edit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(built.stub, folder / STUB_NAME)
    (folder / STUB_NAME).chmod(0o755)
    sync(folder / STUB_NAME)
    built.layout.place(built.environment, folder, linked=linked)
    for name, text in ((SBOM_NAME, built.sbom), (MANIFEST_NAME, built.manifest)):
        (folder / name).write_text(text, "utf-8")
        (folder / name).chmod(0o644)  # whatever the umask: the server may be another user's
        sync(folder / name)
    for name in BUILT_NAMES:
        if (folder / name).exists():
            give_tree(folder / name, owner_of(folder))


def set_environment_path(model: Path, name: str, current: Path | None = None) -> None:
    """Point EXECUTION_ENV_PATH to the layout's name; write nothing if it already does.

    ``current`` is the folder in whose place ``model`` is staged: a relative link out of it leads nowhere from there.
    """
    config = model / CONFIG_NAME
    text = (config if config.exists() else (current or model) / CONFIG_NAME).read_text("utf-8")
    names = "|".join(sorted({re.escape(layout.environment) for layout in LAYOUTS.values()}))
    new = re.sub(rf"\$\$TRITON_MODEL_DIRECTORY/({names})(?=\")", f"$$TRITON_MODEL_DIRECTORY/{name}", text)
    if new != text:
        write_whole(config, new)


def stage_candidate(built: BuiltSet, current: Path, template: Path, new: Path) -> None:
    """Make ``new`` a model folder with what was built, and with the code and configuration that ``current`` will have.

    As in publishing, a model without ``config.pbtxt`` is completed from ``template``.
    """
    new.mkdir(parents=True)
    whole = (current / CONFIG_NAME).exists()
    if (current / CODE).is_dir():
        copy_code(current / CODE, new / CODE)
    if not whole:
        copy_code(template / CODE, new / CODE)
    shutil.copy2((current if whole else template) / CONFIG_NAME, new / CONFIG_NAME)
    if built.adopted_from:
        replace_code(template / CODE, new)
    write_set(built, new, linked=True)
    set_environment_path(new, built.layout.environment)


def copy_code(source: Path, target: Path) -> None:
    """Copy a version folder without bytecode and weights; links are followed, but none to a folder of data, and no volume.

    Python files make a folder that is linked or mounted one of code.
    """
    shutil.copytree(source, target, ignore=_ignore(mounts_in(source)), dirs_exist_ok=True)


def _ignore(volumes: list[Path]) -> Callable[[str, list[str]], Iterable[str]]:
    patterns = shutil.ignore_patterns(*_NOT_READ)

    def ignore(folder: str, names: list[str]) -> set[str]:
        paths = [Path(folder, name) for name in names]
        elsewhere = [p for p in paths if p.is_dir() and (p.is_symlink() or p.resolve() in volumes)]
        dangling = {p.name for p in paths if not p.exists()}  # copytree's own option takes every relative link for one
        return patterns(folder, names) | dangling | {p.name for p in elsewhere if not any(p.glob("*.py"))}

    return ignore
