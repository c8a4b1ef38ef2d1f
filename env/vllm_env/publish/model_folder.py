"""The candidate: what the smoke run serves before anything is published, made from what was built and the person's model.

It holds what tritonserver and ``1/model.py`` read. Weights, adapters and caches stay where they are: the smoke run serves
another model, and in a container the cache is on another file system than the repository, where each would be a copy.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_env.base.mounts import mounts_in

from .publish import CONFIG_NAME, BuiltSet, set_environment_path, write_set

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CODE = "1"
"""The model's version folder, with ``model.py`` and what it imports."""
_NOT_READ = ("__pycache__", "*.pyc", "*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")


def stage_candidate(built: BuiltSet, current: Path, template: Path, new: Path) -> None:
    """Make ``new`` a model folder with what was built, and with the code and configuration that ``current`` will have.

    As in publishing, a model without ``config.pbtxt`` is completed from ``template``.
    """
    new.mkdir(parents=True)
    complete = (current / CONFIG_NAME).exists()
    if (current / CODE).is_dir():
        copy_code(current / CODE, new / CODE)
    if not complete:
        copy_code(template / CODE, new / CODE)
    shutil.copy2((current if complete else template) / CONFIG_NAME, new / CONFIG_NAME)
    write_set(built, new, linked=True)
    set_environment_path(new, built.environment_name)


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
