"""Check the user's files in a model's folder: ``config.pbtxt`` and ``1/model.py``."""

import ast
import json
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf import text_format

from vllm_env.base.command import COMMAND
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.workspace import TEMPLATE

from .manifest import Manifest

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

CONFIG_NAME = "config.pbtxt"
ENGINE_ARGS_NAME = "vllm_engine_args.json"
EXAMPLE_NAME = "vllm_engine_args.example.json"
VERSION_FOLDER = "1"
"""The model's version folder, with ``model.py`` and the modules that it imports."""
OFFICIAL_ARGS_NAME = f"{VERSION_FOLDER}/model.json"
"""The file of engine arguments for the official backend and for Triton's OpenAI frontend."""

ENVIRONMENT_PARAMETER = "EXECUTION_ENV_PATH"
MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"

_COPY = f"Copy it from {TEMPLATE}."


def read_config(model: Path) -> "ModelConfig":
    """Return a model's configuration.

    Raises:
        VllmEnvError: the file is missing, or Triton could not read it.
    """
    file = model / CONFIG_NAME
    try:
        return parse_config(file, read_config_text(file))
    except FileNotFoundError as error:
        raise VllmEnvError(
            f"{file} is missing.", cause="Triton loads no model without it.", remedy=_COPY
        ) from error


def read_config_text(file: Path) -> str:
    """Return the text of a ``config.pbtxt``, with its line ends and all of its bytes.

    A byte that is not UTF-8 becomes a surrogate. Write the text with :func:`encode_config`, and
    show it with :func:`printable`.
    """
    # Triton takes any byte in a comment (protobuf's text format), for example a letter in Latin-1.
    return file.read_bytes().decode("utf-8", "surrogateescape")


def encode_config(text: str) -> bytes:
    """Return the bytes of a text of :func:`read_config_text`."""
    return text.encode("utf-8", "surrogateescape")


def printable(text: str) -> str:
    """Return a text of :func:`read_config_text`; bytes that are not valid UTF-8 become U+FFFD."""
    return encode_config(text).decode("utf-8", "replace")


def parse_config(file: Path, text: str) -> "ModelConfig":
    """Parse a configuration that was read by :func:`read_config_text`.

    Args:
        file: the configuration's path, for messages.
        text: the configuration.

    Raises:
        VllmEnvError: the text is not a model configuration; the message has the line.
    """
    # Its package imports gRPC and NumPy: half of the time in which a command starts.
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    config = ModelConfig()
    try:
        # The definition is the one of tritonclient's release. A newer Triton may know more fields.
        text_format.Parse(text, config, allow_unknown_field=True)
    except text_format.ParseError as error:
        why = printable(str(error))
        # protobuf's own text says only that Python could not encode it.
        if "surrogates not allowed" in why:
            why = f"line {error.GetLine()} has a string that is not UTF-8"
        raise VllmEnvError(
            f"{file} cannot be read as a model configuration: {why}.",
            remedy="Fix the line that the message names.",
        ) from error
    return config


def environment_of(model: Path) -> str:
    """Return the environment's path in a model's configuration, or an empty string."""
    path = read_config(model).parameters[ENVIRONMENT_PARAMETER].string_value
    return str(path.replace(MODEL_DIRECTORY, str(model)))


def check_model(model: Path, manifest: Manifest) -> None:
    """Check that the configuration names the manifest's environment, and that the code parses.

    Raises:
        VllmEnvError: names the file and its required content.
    """
    check_engine_args(model)
    file = model / CONFIG_NAME
    config = read_config(model)
    if config.backend != "python":
        backend = f'the backend "{config.backend}"' if config.backend else "no backend"
        raise VllmEnvError(f"{file} names {backend}.", remedy='Write backend: "python".')
    environment = environment_of(model)
    built = model / manifest.named.name
    # Resolved, because the path may also be absolute or lead through a link.
    if not environment or Path(environment).resolve() != built.resolve():
        raise VllmEnvError(
            f"{file}: {ENVIRONMENT_PARAMETER} is {environment!r}, "
            f"and the built environment is {built}.",
            cause="Triton would use its own Python, or another environment.",
            remedy=f'Write "{MODEL_DIRECTORY}/{manifest.named.name}" there.',
        )
    code = model / VERSION_FOLDER / "model.py"
    try:
        # Parsed but not run: its imports are in the environment, not on this machine.
        ast.parse(_read(code), str(code))
    except (SyntaxError, ValueError) as error:
        raise VllmEnvError(f"{code} cannot be parsed as Python: {error}.", remedy=_COPY) from error


def check_model_folder(model: Path) -> None:
    """Check, before anything is built, that a model in this folder would use the environment.

    Raises:
        VllmEnvError: it is the official backend's model, or two files of engine arguments differ.
    """
    file = model / CONFIG_NAME
    if file.is_file() and read_config(model).backend == "vllm":
        raise VllmEnvError(
            f'{file} names the backend "vllm".',
            cause="It is a model of Triton's official vLLM backend, which does not use the built "
            "environment.",
            remedy="Make a model of this project from it: "
            f"{COMMAND} adopt {model} --model NEW. Or name another --model.",
        )
    check_engine_args(model)


def arguments_file(model: Path) -> str:
    """Return the path of the model's engine arguments, relative to its folder."""
    # If both files exist, they are equal (check_engine_args).
    official = (model / OFFICIAL_ARGS_NAME).is_file() and not (model / ENGINE_ARGS_NAME).is_file()
    return OFFICIAL_ARGS_NAME if official else ENGINE_ARGS_NAME


def check_engine_args(model: Path) -> None:
    """Raise a VllmEnvError if two files of engine arguments differ."""
    ours = model / ENGINE_ARGS_NAME
    official = model / OFFICIAL_ARGS_NAME
    if not ours.is_file() or not official.is_file():
        return
    # The model refuses the same when it is loaded. Here the user learns it before a build.
    differing = _differing(ours, official)
    if differing:
        raise VllmEnvError(
            f"{ours} and {official} differ: {', '.join(differing)}.",
            cause="Both contain the engine arguments, so it is not clear which ones count.",
            remedy=f"Write the right ones into {OFFICIAL_ARGS_NAME}, "
            "which Triton's OpenAI frontend reads, too. Move the other file away.",
        )


def _differing(one: Path, other: Path) -> list[str]:
    """Return the names of the arguments that differ between two files, or the error in one."""
    documents: list[dict[str, object]] = []
    for file in (one, other):
        try:
            document = json.loads(_read(file))
        # Deeply nested brackets raise a RecursionError.
        except (ValueError, RecursionError):
            return [f"{file.name} is not JSON"]
        if not isinstance(document, dict):
            return [f"{file.name} is not a JSON object"]
        documents.append(document)
    first, second = documents
    # An argument with the value null counts as different from a missing one, so None cannot stand
    # for a missing one.
    missing = object()
    names = first.keys() | second.keys()
    return sorted(name for name in names if first.get(name, missing) != second.get(name, missing))


def _read(file: Path) -> str:
    """Return the text of a file without which Triton loads no model.

    Raises:
        VllmEnvError: it is missing, or not UTF-8.
    """
    try:
        return file.read_text("utf-8")
    except FileNotFoundError as error:
        raise VllmEnvError(
            f"{file} is missing.", cause="Triton loads no model without it.", remedy=_COPY
        ) from error
    except UnicodeDecodeError as error:
        raise VllmEnvError(f"{file} is not UTF-8: {error}.", remedy="Save it as UTF-8.") from error
