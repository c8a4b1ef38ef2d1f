"""Check the user's files in a model's folder: ``config.pbtxt`` and ``1/model.py``."""

import ast
import json
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from vllm_env.base.errors import VllmEnvError

from .manifest import Manifest

CONFIG_NAME = "config.pbtxt"
ENGINE_ARGS_NAME, EXAMPLE_NAME = "vllm_engine_args.json", "vllm_engine_args.example.json"
CODE = "1"
"""The model's version folder, with ``model.py`` and the modules that it imports."""
OFFICIAL_ARGS = f"{CODE}/model.json"
"""The file of engine arguments for the official backend and for Triton's OpenAI frontend."""

ENVIRONMENT = "EXECUTION_ENV_PATH"
MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"

_COPY = "Copy it from this checkout's model_repository/vllm."


def read_config(model: Path) -> ModelConfig:
    """Return a model's configuration.

    Raises:
        VllmEnvError: the file is missing, or Triton could not read it.
    """
    file = model / CONFIG_NAME
    return parse_config(file, _read(file))


def parse_config(file: Path, text: str) -> ModelConfig:
    """Parse a configuration; ``file`` is its path, for messages. Fields that only a newer Triton knows are ignored.

    Raises:
        VllmEnvError: the text is not a model configuration; the message has the line.
    """
    config = ModelConfig()
    try:
        text_format.Parse(text, config, allow_unknown_field=True)
    except text_format.ParseError as error:
        raise VllmEnvError(
            f"{file} is no model configuration: {error}.", remedy="Mend that line."
        ) from error
    return config


def environment_of(model: Path) -> str:
    """Return the path of the environment that a model's configuration names, or an empty string."""
    named = read_config(model).parameters[ENVIRONMENT].string_value
    return str(named.replace(MODEL_DIRECTORY, str(model)))


def check_model(model: Path, manifest: Manifest) -> None:
    """Check that a model's configuration names the manifest's environment, and that its code parses.

    Raises:
        VllmEnvError: names the file and its required content.
    """
    check_engine_args(model)
    file, code = model / CONFIG_NAME, model / CODE / "model.py"
    config = read_config(model)
    if config.backend != "python":
        stands = f'names the backend "{config.backend}"' if config.backend else "names no backend"
        raise VllmEnvError(f"{file} {stands}.", remedy='Write backend: "python".')
    named, wanted = environment_of(model), model / manifest.archive.name
    if not named or Path(named).resolve() != wanted.resolve():
        raise VllmEnvError(
            f"{file}: {ENVIRONMENT} is {named!r}, and the environment that was built is {wanted}.",
            cause="Triton would take its own Python, or another environment.",
            remedy=f'Write "{MODEL_DIRECTORY}/{manifest.archive.name}" there.',
        )
    try:
        ast.parse(_read(code), str(code))
    except (SyntaxError, ValueError) as error:
        raise VllmEnvError(f"{code} is no Python: {error}.", remedy=_COPY) from error


def check_receiver(model: Path) -> None:
    """Check, before anything is built, that Triton would use the environment in this folder.

    Raises:
        VllmEnvError: it is a model of the official backend, or has two files of engine arguments that differ.
    """
    file = model / CONFIG_NAME
    if file.is_file() and read_config(model).backend == "vllm":
        raise VllmEnvError(
            f'{file} names the backend "vllm".',
            cause="It is a model of Triton's official vLLM backend, which would not take what is built here.",
            remedy=f"Make a model of this project from it: ./gen_vllm_env.sh adopt {model} --model NEW. Or name another --model.",
        )
    check_engine_args(model)


def arguments_file(model: Path) -> str:
    """Return the path of the model's engine arguments, relative to its folder."""
    official = (model / OFFICIAL_ARGS).is_file() and not (model / ENGINE_ARGS_NAME).is_file()
    # If both files exist, they are equal (check_engine_args).
    return OFFICIAL_ARGS if official else ENGINE_ARGS_NAME


def check_engine_args(model: Path) -> None:
    """Raise a VllmEnvError if two files of engine arguments differ; the model does the same when it is loaded."""
    ours, official = model / ENGINE_ARGS_NAME, model / OFFICIAL_ARGS
    if ours.is_file() and official.is_file() and (differing := _differing(ours, official)):
        raise VllmEnvError(
            f"{ours} and {official} differ: {', '.join(differing)}.",
            cause="Both hold the engine arguments, and one file must be the truth.",
            remedy=f"Put what is meant into {OFFICIAL_ARGS}, which Triton's OpenAI frontend reads too, and remove the other.",
        )


def _differing(one: Path, other: Path) -> list[str]:
    """Return the names of the engine arguments that differ between two files, or the error in one of them."""
    documents: list[dict[str, object]] = []
    for file in (one, other):
        try:
            documents.append(json.loads(_read(file)))
        except (ValueError, RecursionError):
            return [f"{file.name} is not JSON"]
        if not isinstance(documents[-1], dict):
            return [f"{file.name} holds no JSON object"]
    # An argument with the value null counts as different from a missing one.
    first, second = documents
    return sorted(
        name
        for name in first.keys() | second.keys()
        if (name in first, first.get(name)) != (name in second, second.get(name))
    )


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except FileNotFoundError as error:
        raise VllmEnvError(
            f"{file} is missing.", cause="Triton loads no model without it.", remedy=_COPY
        ) from error
    except UnicodeDecodeError as error:
        raise VllmEnvError(f"{file} is not UTF-8: {error}.", remedy="Write it as UTF-8.") from error
