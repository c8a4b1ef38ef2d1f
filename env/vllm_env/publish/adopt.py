"""Make a model of this project from a model folder of Triton's official vLLM backend, which is only read.

Small files are copied, and ``config.pbtxt`` is edited. Weights and adapters stay where they are; the engine arguments name
them by absolute paths. Links would break in a container that mounts only one of the two folders. Hard links need one file
system and change the times of the old files.
"""

import difflib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_env.base.errors import UsageError, VllmEnvError
from vllm_env.base.filesystem import make_readable, mounts_in, write_whole
from vllm_env.model.files import (
    CODE,
    CONFIG_NAME,
    ENVIRONMENT,
    MODEL_DIRECTORY,
    OFFICIAL_ARGS,
    arguments_file,
    check_engine_args,
    parse_config,
)
from vllm_env.model.manifest import CACHE_NAME, MANIFEST_NAME, read_manifest

from .exchange import STAGING, refuse_mounts
from .model_config import rewrite_config
from .model_folder import BUILT_NAMES, CODE_NAMES, WEIGHTS, replace_code

LORA_NAME = "multi_lora.json"
_NOT_TAKEN = (*BUILT_NAMES, CACHE_NAME, *(f"{CODE}/{name}" for name in CODE_NAMES))
_LARGE = 10_000_000
"""A larger file (in bytes) stays where it is. A tokenizer.json may have 30 MB, but then it lies next to weights."""

Documents = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Adoption:
    """The result of adopting a folder, known before anything is built.

    Attributes:
        source: the official backend's model folder.
        config: the new ``config.pbtxt``.
        copied: the files of ``source`` that are copied.
        left: the files and folders of ``source`` that stay where they are.
        rewritten: the JSON files in which a path becomes absolute, by their path in the folder.
        own: the JSON files with which the smoke run serves the model, the engine arguments first.
        difference: a unified diff of what changes, for the user to read before the build.
        outdated: whether the adopted target lacks its configuration, or its code differs from this project's.
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
    _require_folder(source)
    file = source / CONFIG_NAME
    text = _read(file)
    _check_version(source)
    config = parse_config(file, text)
    _check_backend(source, config.backend, config.parameters[ENVIRONMENT].string_value)
    check_engine_args(source)
    documents = _documents(source)
    _refuse_template(target, template)
    refuse_target(source, target)
    new = rewrite_config(file, text, environment)
    rewritten = {
        name: document
        for name, document in documents.items()
        if document != _json_object(source / name)
    }
    try:
        copied, left = _divide(source, documents)
    except OSError as error:
        raise _unreadable(source, error) from error
    again = (target / MANIFEST_NAME).is_file()
    if again and os.path.lexists(target / CONFIG_NAME):
        documents = _documents(target)
        difference = _code_difference(target, template)
    elif again:  # the build will copy the missing files from source
        documents = _documents(target, source)
        difference = _unified(CONFIG_NAME, "", new) + _code_difference(target, template)
    else:
        difference = _new_difference(source, text, new, rewritten)
    return Adoption(
        source=source,
        config=new,
        copied=copied,
        left=left,
        rewritten=rewritten,
        own=documents,
        difference=difference,
        outdated=again and bool(difference),
    )


def refuse_target(source: Path, target: Path) -> None:
    """Check that ``target`` is free for a model adopted from ``source``.

    Raises:
        VllmEnvError: ``target`` is ``source``, lies inside it or contains it; or it was not adopted from ``source``; or
            its code cannot be replaced.
    """
    where = "Name another folder with --model-repository, or another name with --model."
    # Compare the folders themselves, not their names: a mount or a link may show one folder in two places.
    resolved = Path(os.path.realpath(target))
    if _is_same_or_above(source, resolved) or _is_same_or_above(resolved, source):
        raise VllmEnvError(
            f"{target} is {source}, or one lies inside the other.",
            cause="adopt never writes into the folder that it reads.",
            remedy=where,
        )
    # Publishing in place first makes a folder that holds only staging.
    is_empty = target.is_dir() and all(path.name.startswith(STAGING) for path in target.iterdir())
    if is_empty or not os.path.lexists(target):
        return
    manifest = read_manifest(target)
    if manifest is None or manifest.adopted_from != str(source):
        raise VllmEnvError(
            f"{target} exists, and its manifest does not say that it was adopted from {source}.",
            cause="Its files would be mixed with those of another model.",
            remedy=f"{where} Or remove it, if nobody needs it.",
        )
    code = target / CODE
    if code.is_symlink() or code.resolve() in mounts_in(code):
        raise VllmEnvError(
            f"{code} is a link or a mount point.",
            cause="Its code would be replaced in another place.",
            remedy="Put a folder there.",
        )
    refuse_mounts(target, tuple(f"{CODE}/{name}" for name in CODE_NAMES))


def _refuse_template(target: Path, template: Path) -> None:
    """Raise a VllmEnvError for this project's own model: it must stay, because every new model is made from it."""
    if target.exists() and target.samefile(template):
        raise VllmEnvError(
            f"{target} is this project's own model.",
            cause="Every new model is made from its files.",
            remedy="Give the new model another name: --model NEW.",
        )


def stage_template(adoption: Adoption, template: Path, folder: Path) -> Path:
    """Write the adopted model's files into the new ``folder``, without built files, and return the folder.

    Raises:
        VllmEnvError: a file cannot be read or copied.
    """
    try:
        for file in adoption.copied:
            copy = folder / file.relative_to(adoption.source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy)
    except OSError as error:
        raise _unreadable(adoption.source, error) from error
    for name, document in adoption.rewritten.items():
        write_whole(folder / name, _json_text(document))
    (folder / CODE).mkdir(exist_ok=True)
    replace_code(template / CODE, folder)
    for name in CODE_NAMES:
        make_readable(folder / CODE / name)
    write_whole(folder / CONFIG_NAME, adoption.config)
    return folder


def _is_same_or_above(folder: Path, other: Path) -> bool:
    return folder.exists() and any(
        path.exists() and path.samefile(folder) for path in (other, *other.parents)
    )


def _divide(source: Path, documents: Documents) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the files to copy, and the files and folders that stay where they are."""
    named = {
        Path(value)
        for document in documents.values()
        for value in document.values()
        if isinstance(value, str)
    }
    copied: list[Path] = []
    left: list[Path] = []
    waiting = [source]
    while waiting:
        for path in sorted(waiting.pop().iterdir()):
            name = path.relative_to(source).as_posix()
            if path.name == "__pycache__":
                continue
            if (
                name == CODE
            ):  # copy its small files even if the engine arguments name this folder as the model
                waiting.append(path)
            elif name in _NOT_TAKEN or path in named:
                left.append(path)
            elif path.is_dir():
                is_data = path.is_symlink() or _holds_weights(path)
                (left if is_data else waiting).append(path)
            elif path.is_file():
                (left if _is_weights(path) else copied).append(path)
    return tuple(copied), tuple(left)


def _holds_weights(folder: Path) -> bool:
    return any(
        _is_weights(Path(place, name)) for place, _, names in os.walk(folder) for name in names
    )


def _is_weights(file: Path) -> bool:
    return file.suffix in WEIGHTS or (file.is_file() and file.stat().st_size > _LARGE)


def _unreadable(source: Path, error: OSError) -> VllmEnvError:
    return VllmEnvError(
        f"{source} cannot be copied: {error.strerror} ({error.filename}).",
        cause="Its small files are copied into the new model.",
        remedy="Change the permissions of that file, or free space, and try again.",
    )


def _require_folder(model: Path) -> None:
    if not model.is_dir():
        raise UsageError(
            f"{model} is not a folder.", remedy="Name a model's folder, the one with config.pbtxt."
        )


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")  # read_text() would change the line ends
    except FileNotFoundError as error:
        cause = "Every model of Triton's has one; without it the official backend's model is not served either."
        raise VllmEnvError(
            f"{file} is missing.",
            cause=cause,
            remedy="Name a model's folder, the one with config.pbtxt.",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise VllmEnvError(
            f"{file} cannot be read: {error}.",
            remedy="Change its permissions, or write it as UTF-8.",
        ) from error


def _check_version(model: Path) -> None:
    """Check that the model has exactly one version, ``1``: a build completes only that one."""
    # Triton ignores folder names with leading zeros.
    names = sorted(path.name for path in model.iterdir() if path.is_dir())
    versions = [name for name in names if re.fullmatch("0|[1-9][0-9]*", name)]
    if versions != [CODE]:
        found = f"the versions {', '.join(versions)}" if versions else "no version"
        remedy = f"Leave one folder, {CODE}/ with model.json; make a model of its own of each other version."
        raise VllmEnvError(
            f"{model} has {found}, and a model is adopted with version {CODE} alone.", remedy=remedy
        )


def _check_backend(model: Path, backend: str, environment: str) -> None:
    ours = environment.startswith(MODEL_DIRECTORY) and (model / CODE / "triton_vllm").is_dir()
    if backend == "python" and ours:
        raise VllmEnvError(
            f"{model} is a model of this project already.",
            cause="Only a model of Triton's vLLM backend can be adopted.",
            remedy=f"Build for it: ./gen_vllm_env.sh --model-repository {model.parent} --model {model.name}",
        )
    if backend != "vllm":
        raise VllmEnvError(
            f'{model / CONFIG_NAME} names the backend "{backend}".',
            cause='Only a model of Triton\'s vLLM backend (backend: "vllm") can be adopted.',
            remedy="Name such a model's folder.",
        )


def _documents(*models: Path) -> Documents:
    """Return the engine arguments, then the adapters, by file. A folder in the model folder gets its absolute path.

    The model looks for such folders in its own folder. Every other relative path starts at the server's working folder,
    before and after adopting. If several ``models`` have a file, the first one counts.
    """
    model = next((model for model in models if (model / arguments_file(model)).is_file()), None)
    if model is None:
        what = f"{models[0] / OFFICIAL_ARGS} is missing."
        raise VllmEnvError(
            what, cause="It holds the engine arguments.", remedy='Write it, e.g. {"model": "…"}.'
        )
    first = arguments_file(model)
    documents = {}
    for name in (first, OFFICIAL_ARGS):  # both files may exist, with the same content
        if (model / name).is_file():
            arguments = _json_object(model / name)
            documents[name] = arguments | _whole_paths(
                model, {key: arguments.get(key) for key in ("model", "tokenizer")}
            )
    enabled = (
        str(documents[first].get("enable_lora", "")).lower() == "true"
    )  # without it, no backend reads the adapters' file
    for name in (f"{CODE}/{LORA_NAME}", LORA_NAME):
        place = next((model for model in models if (model / name).is_file()), None)
        if enabled and place:
            adapters = _json_object(place / name)
            documents[name] = adapters | _whole_paths(place, adapters)
    return documents


# Values without a name of their own, such as "." or "/", are not looked up.
def _whole_paths(model: Path, named: dict[str, Any]) -> dict[str, str]:
    strings = {
        key: model / value
        for key, value in named.items()
        if isinstance(value, str) and value.strip("./")
    }
    return {key: str(path) for key, path in strings.items() if os.path.isdir(path)}  # noqa: PTH112 - False if it may not be entered


def _json_object(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise VllmEnvError(f"{file} is not JSON: {error}.", remedy="Correct it.") from error
    if not isinstance(document, dict):
        remedy = (
            'Write {"NAME": "PATH", …}.' if file.name == LORA_NAME else 'Write {"model": "…", …}.'
        )
        raise VllmEnvError(
            f"{file} holds a JSON {type(document).__name__}, not an object.", remedy=remedy
        )
    return document


def _json_text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=4) + "\n"


def _new_difference(source: Path, before: str, after: str, rewritten: Documents) -> str:
    """Return the unified diff of the files that are changed while they are copied."""
    parts = [_unified(CONFIG_NAME, before, after)]
    for name, document in rewritten.items():
        parts.append(_unified(name, _text(source / name), _json_text(document)))
    return "".join(parts)


def _code_difference(target: Path, template: Path) -> str:
    """Return the unified diff of the code that adopting again replaces."""
    old = _code(target / CODE)
    new = _code(template / CODE)
    names = sorted(old.keys() | new.keys())
    return "".join(
        _unified(f"{CODE}/{name}", _text(old.get(name)), _text(new.get(name))) for name in names
    )


def _code(folder: Path) -> dict[str, Path]:
    """Return the files of the model's code by their path in the version folder."""
    files: Iterable[Path] = (folder / CODE_NAMES[0], *(folder / CODE_NAMES[1]).rglob("*.py"))
    return {file.relative_to(folder).as_posix(): file for file in files if file.is_file()}


def _text(file: Path | None) -> str:
    return file.read_bytes().decode("utf-8", "replace") if file and file.is_file() else ""


def _unified(name: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{name} (old)", f"{name} (new)", lineterm=""
    )
    return "".join(f"{line}\n" for line in lines)
