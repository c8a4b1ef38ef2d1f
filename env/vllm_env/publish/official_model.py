"""Read a model folder of Triton's official vLLM backend; nothing is written.

The folder must be one that this project can adopt: one version, the vLLM backend, and engine
arguments that can be read.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm_env.base.command import COMMAND
from vllm_env.base.errors import UsageError, VllmEnvError
from vllm_env.model.files import (
    CONFIG_NAME,
    ENVIRONMENT_PARAMETER,
    MODEL_DIRECTORY,
    OFFICIAL_ARGS_NAME,
    VERSION_FOLDER,
    arguments_file,
    check_engine_args,
    parse_config,
    read_config_text,
)

LORA_NAME = "multi_lora.json"
"""The file that names the LoRA adapters, as the official backend has it."""

Documents = dict[str, dict[str, Any]]
"""JSON objects by the path of their file in the model's folder."""

_NAME_A_MODEL = "Name a model's folder, the one with config.pbtxt."


def read_official_config(model: Path) -> str:
    """Return the text of the folder's ``config.pbtxt`` if its model can be adopted.

    Raises:
        UsageError: ``model`` is not a folder.
        VllmEnvError: the model cannot be adopted; the message names the file and the reason.
    """
    if not model.is_dir():
        raise UsageError(f"{model} is not a folder.", remedy=_NAME_A_MODEL)
    file = model / CONFIG_NAME
    with _read_errors_explained(file):
        text = read_config_text(file)
    _check_version(model)
    config = parse_config(file, text)
    _check_backend(model, config.backend, config.parameters[ENVIRONMENT_PARAMETER].string_value)
    check_engine_args(model)
    return text


def read_text(file: Path) -> str:
    """Return the text of a file of the model, with its line ends.

    Raises:
        VllmEnvError: the file is missing, or it cannot be read as UTF-8.
    """
    with _read_errors_explained(file):
        # Path.read_text() would turn \r\n into \n, and an edited copy would differ in every line.
        return file.read_bytes().decode("utf-8")


@contextlib.contextmanager
def _read_errors_explained(file: Path) -> Iterator[None]:
    """Turn an error of reading ``file`` in the block into a VllmEnvError with the remedy."""
    try:
        yield
    except FileNotFoundError as error:
        raise VllmEnvError(
            f"{file} is missing.",
            cause="Triton serves no model without it.",
            remedy=_NAME_A_MODEL,
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise VllmEnvError(
            f"{file} cannot be read: {error}.",
            remedy="Change its permissions, or write it as UTF-8.",
        ) from error


def _check_version(model: Path) -> None:
    """Check that the model has exactly one version, ``1``."""
    # A build completes version 1 only. Triton ignores folder names with leading zeros.
    names = sorted(path.name for path in model.iterdir() if path.is_dir())
    versions = [name for name in names if re.fullmatch("0|[1-9][0-9]*", name)]
    if versions == [VERSION_FOLDER]:
        return
    content = f"the versions {', '.join(versions)}" if versions else "no version"
    raise VllmEnvError(
        f"{model} has {content}, and a model is adopted with version {VERSION_FOLDER} alone.",
        remedy=(
            f"Leave one folder, {VERSION_FOLDER}/ with model.json. "
            "Make a separate model of each other version."
        ),
    )


def _check_backend(model: Path, backend: str, environment: str) -> None:
    """Check that a model is one of Triton's vLLM backend.

    Args:
        model: the model's folder.
        backend: the backend in its configuration.
        environment: the path of its environment there; "" if it has none.

    Raises:
        VllmEnvError: it is one of this project, or of another backend.
    """
    # Other Python models may also have an environment of their own, so look for our code, too.
    is_ours = (
        environment.startswith(MODEL_DIRECTORY)
        and (model / VERSION_FOLDER / "triton_vllm").is_dir()
    )
    if backend == "python" and is_ours:
        build = f"{COMMAND} --model-repository {model.parent} --model {model.name}"
        raise VllmEnvError(
            f"{model} is a model of this project already.",
            cause="Only a model of Triton's vLLM backend can be adopted.",
            remedy=f"Build for it: {build}",
        )
    if backend != "vllm":
        raise VllmEnvError(
            f'{model / CONFIG_NAME} names the backend "{backend}".',
            cause='Only a model of Triton\'s vLLM backend (backend: "vllm") can be adopted.',
            remedy="Name such a model's folder.",
        )


def read_documents(*models: Path) -> Documents:
    """Return the engine arguments, then the adapters; a folder of the model has its absolute path.

    If several of the folders ``models`` have a file, the first one counts.

    Raises:
        VllmEnvError: no model has engine arguments, or a file cannot be read.
    """
    # 1) The engine arguments.
    model = next((model for model in models if (model / arguments_file(model)).is_file()), None)
    if model is None:
        raise VllmEnvError(
            f"{models[0] / OFFICIAL_ARGS_NAME} is missing.",
            cause="It holds the engine arguments.",
            remedy='Write it, e.g. {"model": "…"}.',
        )
    documents = {}
    first = arguments_file(model)
    # If both files exist, they have the same content (check_engine_args).
    for name in (first, OFFICIAL_ARGS_NAME):
        if (model / name).is_file():
            document = read_object(model / name)
            documents[name] = _with_absolute_paths(model, document, ("model", "tokenizer"))
    # 2) The adapters. Without enable_lora, no backend reads their file, so it may even be broken.
    # In old files the value may be a string ("true").
    if str(documents[first].get("enable_lora", "")).lower() != "true":
        return documents
    # The official backend's file is in the version folder, ours may be next to config.pbtxt.
    for name in (f"{VERSION_FOLDER}/{LORA_NAME}", LORA_NAME):
        place = next((model for model in models if (model / name).is_file()), None)
        if place:
            adapters = read_object(place / name)
            documents[name] = _with_absolute_paths(place, adapters, adapters)
    return documents


def _with_absolute_paths(
    model: Path, document: dict[str, Any], keys: Iterable[str]
) -> dict[str, Any]:
    """Return a document in which the values of ``keys`` that name a folder are absolute paths."""
    # Only such values change: a model looks for them in its own folder. Every other relative path
    # starts at the server's working folder, before and after adopting.
    changed = dict(document)
    for key in keys:
        value = document.get(key)
        # A value such as "." or "/" names no folder of the model.
        if not isinstance(value, str) or not value.strip("./"):
            continue
        # Path.is_dir() raises if a folder may not be entered; os.path.isdir() returns False.
        if os.path.isdir(model / value):  # noqa: PTH112
            changed[key] = str(model / value)
    return changed


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        VllmEnvError: the file cannot be read, or it holds no JSON object.
    """
    try:
        document = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise VllmEnvError(f"{file} is not JSON: {error}.", remedy="Correct it.") from error
    if not isinstance(document, dict):
        example = '{"NAME": "PATH", …}' if file.name == LORA_NAME else '{"model": "…", …}'
        raise VllmEnvError(
            f"{file} holds a JSON {type(document).__name__}, not an object.",
            remedy=f"Write {example}.",
        )
    return document
