"""Make a model of this project from a model folder of Triton's official vLLM backend.

The old folder is only read. Small files are copied, and ``config.pbtxt`` is edited. Weights and
adapters stay where they are; the engine arguments name them by absolute paths.
"""
# Nothing is linked. A symbolic link would break in a container that mounts only one of the two
# folders. A hard link needs one file system and changes the times of the old files.

import contextlib
import difflib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import make_readable, mounts_in, write_whole
from vllm_env.model.files import CONFIG_NAME, VERSION_FOLDER, encode_config, printable
from vllm_env.model.manifest import CACHE_NAME, MANIFEST_NAME, read_manifest

from .exchange import STAGING_PREFIX, refuse_mounts
from .model_config import rewrite_config
from .model_folder import BUILT_NAMES, CODE_NAMES, WEIGHT_SUFFIXES, copy_own_code
from .official_model import (
    Documents,
    read_documents,
    read_object,
    read_official_config,
    read_text,
)

_OWN_CODE = tuple(f"{VERSION_FOLDER}/{name}" for name in CODE_NAMES)
_NOT_TAKEN = (*BUILT_NAMES, CACHE_NAME, *_OWN_CODE)
# A larger file (in bytes) stays where it is. A tokenizer.json may have 30 MB, but then it is next
# to weights.
_LARGE_FILE_BYTES = 10_000_000


@dataclass(frozen=True)
class Adoption:
    """The result of adopting a folder, known before anything is built.

    Attributes:
        source: the official backend's model folder.
        config: the new ``config.pbtxt``, as ``read_config_text`` returns it.
        copied: the files of ``source`` that are copied.
        left: the files and folders of ``source`` that stay where they are.
        rewritten: the JSON files in which a path becomes absolute, by their path in the folder.
        own: the JSON files with which the smoke run serves the model, the engine arguments first.
        difference: a unified diff of what changes, for the user to read before the build.
        outdated: whether the adopted target lacks its configuration, or its code is not current.
    """

    source: Path
    config: str
    copied: tuple[Path, ...]
    left: tuple[Path, ...]
    rewritten: Documents
    own: Documents
    difference: str
    outdated: bool


def read_adoption(source: Path, target: Path, template: Path, environment: str) -> Adoption:
    """Return the result of adopting ``source`` as ``target``; write nothing.

    Args:
        source: the official backend's model folder, without links in its path.
        target: the model folder to make, or one that was adopted from ``source`` before.
        template: this project's own model.
        environment: the name of the environment in the model folder.

    Raises:
        UsageError: ``source`` is not a folder.
        VllmEnvError: ``source`` cannot be adopted, or ``target`` cannot receive it.
    """
    # 1) Check both folders.
    text = read_official_config(source)
    documents = read_documents(source)
    refuse_target(source, target)
    # 2) Work out the new files.
    config = rewrite_config(source / CONFIG_NAME, text, environment)
    rewritten = {
        name: document
        for name, document in documents.items()
        if document != read_object(source / name)
    }
    with _copy_errors_explained(source):
        copied, left = _divide(source, documents)
    # 3) Compare them with the files that are there.
    own = documents
    adopted_before = (target / MANIFEST_NAME).is_file()
    if not adopted_before:
        difference = _new_difference(source, text, config, rewritten)
    elif os.path.lexists(target / CONFIG_NAME):
        # Adopting again replaces only the code.
        own = read_documents(target)
        difference = _code_difference(target, template)
    else:
        # Without a configuration, the build will also copy the missing files from the source.
        own = read_documents(target, source)
        difference = _unified(CONFIG_NAME, "", config) + _code_difference(target, template)
    return Adoption(
        source=source,
        config=config,
        copied=copied,
        left=left,
        rewritten=rewritten,
        own=own,
        difference=difference,
        outdated=adopted_before and bool(difference),
    )


def refuse_target(source: Path, target: Path) -> None:
    """Check that ``target`` is free for a model adopted from ``source``.

    Raises:
        VllmEnvError: ``target`` is ``source``, lies inside it or contains it. Or it was not
            adopted from ``source``. Or its code cannot be replaced.
    """
    where = "Give another name (--model NEW) or another folder (--model-repository DIR)."
    # Compare the folders themselves, not their names: a mount or a link may show one folder in
    # two places.
    resolved = Path(os.path.realpath(target))
    if _is_same_or_above(source, resolved) or _is_same_or_above(resolved, source):
        raise VllmEnvError(
            f"{target} is {source}, or one lies inside the other.",
            cause="adopt never writes into the folder that it reads.",
            remedy=where,
        )
    # A folder that holds only staging counts as empty, too. A build that publishes in place makes
    # it first, and leaves it if it is killed.
    is_empty = target.is_dir() and all(
        path.name.startswith(STAGING_PREFIX) for path in target.iterdir()
    )
    if is_empty or not os.path.lexists(target):
        return
    manifest = read_manifest(target)
    if manifest is None or manifest.adopted_from != str(source):
        raise VllmEnvError(
            f"{target} exists, and its manifest does not say that it was adopted from {source}.",
            cause="Its files would be mixed with those of another model.",
            remedy=where,
        )
    code = target / VERSION_FOLDER
    if code.is_symlink() or code.resolve() in mounts_in(code):
        raise VllmEnvError(
            f"{code} is a link or a mount point.",
            cause="The code would be replaced in another place.",
            remedy="Put a folder there.",
        )
    refuse_mounts(target, _OWN_CODE)


def _is_same_or_above(folder: Path, other: Path) -> bool:
    """Return whether ``other`` is ``folder`` or lies inside it; either may be missing."""
    return folder.exists() and any(
        path.exists() and path.samefile(folder) for path in (other, *other.parents)
    )


def stage_template(adoption: Adoption, template: Path, folder: Path) -> Path:
    """Write the adopted model's files into a new folder, without built files; return the folder.

    ``template`` is this project's own model, whose code it gets.

    Raises:
        VllmEnvError: a file cannot be read or copied.
    """
    with _copy_errors_explained(adoption.source):
        for file in adoption.copied:
            copy = folder / file.relative_to(adoption.source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy)
    for name, document in adoption.rewritten.items():
        write_whole(folder / name, _json_text(document))
    code = folder / VERSION_FOLDER
    code.mkdir(exist_ok=True)
    copy_own_code(template / VERSION_FOLDER, code)
    for name in _OWN_CODE:
        make_readable(folder / name)
    write_whole(folder / CONFIG_NAME, encode_config(adoption.config))
    return folder


@contextlib.contextmanager
def _copy_errors_explained(source: Path) -> Iterator[None]:
    """Turn an OSError of the block into a VllmEnvError that says what was copied from where."""
    try:
        yield
    except OSError as error:
        raise VllmEnvError(
            f"{source} cannot be copied: {error.strerror} ({error.filename}).",
            cause="Its small files are copied into the new model.",
            remedy="Change the permissions of that file, or free space, and try again.",
        ) from error


def _divide(source: Path, documents: Documents) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the files to copy, and the files and folders that stay where they are.

    ``documents`` has the model's JSON files, in which the paths of its folders are absolute.
    """
    # The weights and adapters that the engine loads, among other values.
    named_paths = {
        Path(value)
        for document in documents.values()
        for value in document.values()
        if isinstance(value, str)
    }
    copied: list[Path] = []
    left: list[Path] = []
    # Folders whose entries are still to be divided.
    waiting = [source]
    while waiting:
        for path in sorted(waiting.pop().iterdir()):
            name = path.relative_to(source).as_posix()
            if path.name == "__pycache__":
                continue
            # The small files of the version folder are copied even if the engine arguments name
            # that folder as the model.
            if name == VERSION_FOLDER:
                waiting.append(path)
            elif name in _NOT_TAKEN or path in named_paths:
                left.append(path)
            elif path.is_dir():
                # A linked folder may be large, or lead back to a folder above.
                stays = path.is_symlink() or _holds_weights(path)
                group = left if stays else waiting
                group.append(path)
            # Not a broken link, a FIFO or a socket: copying would fail or wait.
            elif path.is_file():
                group = left if _is_weights(path) else copied
                group.append(path)
    return tuple(copied), tuple(left)


def _holds_weights(folder: Path) -> bool:
    """Return whether a file in a folder or below it has weights or is large."""
    return any(
        _is_weights(Path(inner, name)) for inner, _, names in os.walk(folder) for name in names
    )


def _is_weights(file: Path) -> bool:
    """Return whether a file has weights by its name, or is as large."""
    return file.suffix in WEIGHT_SUFFIXES or (
        file.is_file() and file.stat().st_size > _LARGE_FILE_BYTES
    )


def _json_text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=4) + "\n"


def _new_difference(source: Path, before: str, after: str, rewritten: Documents) -> str:
    """Return the unified diff of the files that are changed while they are copied."""
    parts = [_unified(CONFIG_NAME, before, after)]
    for name, document in rewritten.items():
        parts.append(_unified(name, read_text(source / name), _json_text(document)))
    return "".join(parts)


def _code_difference(target: Path, template: Path) -> str:
    """Return the unified diff of the code that adopting again replaces."""
    old = _code(target / VERSION_FOLDER)
    new = _code(template / VERSION_FOLDER)
    names = sorted(old.keys() | new.keys())
    return "".join(
        _unified(f"{VERSION_FOLDER}/{name}", old.get(name, ""), new.get(name, "")) for name in names
    )


def _code(folder: Path) -> dict[str, str]:
    """Return the texts of the model's code by their path in the version folder."""
    programs = (folder / name for name in CODE_NAMES if name.endswith(".py"))
    files = (*programs, *(folder / "triton_vllm").rglob("*.py"))
    # The user may have edited these files in any encoding; the text is only shown.
    return {
        file.relative_to(folder).as_posix(): file.read_bytes().decode(errors="replace")
        for file in files
        if file.is_file()
    }


def _unified(name: str, before: str, after: str) -> str:
    """Return the unified diff of a file's text; "" if both are equal."""
    lines = difflib.unified_diff(
        printable(before).splitlines(),
        printable(after).splitlines(),
        fromfile=f"{name} (old)",
        tofile=f"{name} (new)",
        lineterm="",
    )
    return "".join(f"{line}\n" for line in lines)
