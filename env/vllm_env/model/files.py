"""Checks what stands around the environment in a model's folder: ``config.pbtxt`` and ``1/model.py``, which are the user's."""

import ast
import json
import re
from pathlib import Path

from vllm_env.base.errors import VllmEnvError

from .manifest import Manifest

CONFIG_NAME = "config.pbtxt"
ENGINE_ARGS_NAME, EXAMPLE_NAME = "vllm_engine_args.json", "vllm_engine_args.example.json"
CODE = "1"
"""The model's version folder, with ``model.py`` and what it imports."""
OFFICIAL_ARGS = f"{CODE}/model.json"
"""Where the official backend, and Triton's OpenAI frontend, have the engine arguments."""

_COPY = "Copy it from this checkout's model_repository/vllm."
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
# strings are kept, so that a # in one begins no comment
_COMMENT = re.compile(r"""("[^"\n]*"|'[^'\n]*')|#[^\n]*""")
_BACKEND = re.compile(r"""(?:^|[\s;,}\]])backend\s*:\s*(["'])(.*?)\1""")
_ENVIRONMENT = re.compile(
    r"""\bkey\s*:\s*(["'])EXECUTION_ENV_PATH\1[\s,;]*value\s*:?\s*[{<]\s*string_value\s*:\s*(["'])(.*?)\2"""
)


def check_model(model: Path, manifest: Manifest) -> None:
    """Refuse a model whose configuration does not lead Triton to the manifest's environment, or whose code does not parse.

    Raises:
        VllmEnvError: naming the file and what must stand there.
    """
    check_engine_args(model)
    config, code = model / CONFIG_NAME, model / CODE / "model.py"
    text = _COMMENT.sub(lambda found: found[1] or "", _read(config))
    backend = _BACKEND.search(text)
    if backend is None or backend[2] != "python":
        stands = f'names the backend "{backend[2]}"' if backend else "names no backend"
        raise VllmEnvError(f"{config} {stands}.", remedy='Write backend: "python".')
    places, wanted = _ENVIRONMENT.findall(text), model / manifest.archive.name
    named = places[-1][2] if places else ""  # the last one counts
    if not named or Path(named.replace(_MODEL_DIRECTORY, str(model))).resolve() != wanted.resolve():
        raise VllmEnvError(
            f"{config}: EXECUTION_ENV_PATH is {named!r}, and the environment that was built is {wanted}.",
            cause="Triton would take its own Python, or another environment.",
            remedy=f'Write "{_MODEL_DIRECTORY}/{manifest.archive.name}" there.',
        )
    try:
        ast.parse(_read(code), str(code))
    except (SyntaxError, ValueError) as error:
        raise VllmEnvError(f"{code} is no Python: {error}.", remedy=_COPY) from error


def check_receiver(model: Path, *, adopted: bool = False) -> None:
    """Refuse, before anything is built, a folder beside whose files the environment would not be served.

    Raises:
        VllmEnvError: it is a model of the official backend that is not ``adopted`` now, or has two files of engine arguments
            that differ.
    """
    config = model / CONFIG_NAME
    backend = _BACKEND.search(_COMMENT.sub(lambda found: found[1] or "", _read(config))) if config.is_file() else None
    if backend and backend[2] == "vllm" and not adopted:
        raise VllmEnvError(
            f'{config} names the backend "vllm".',
            cause="It is a model of Triton's official vLLM backend, which would not take what is built here.",
            remedy=f"Take it over, with a way back: ./gen_vllm_env.sh adopt {model}. Or name another --model.",
        )
    check_engine_args(model)


def arguments_file(model: Path) -> str:
    """Return the name of the file from which a model takes its engine arguments, from its folder on."""
    official = (model / OFFICIAL_ARGS).is_file() and not (model / ENGINE_ARGS_NAME).is_file()
    return OFFICIAL_ARGS if official else ENGINE_ARGS_NAME


def check_engine_args(model: Path) -> None:
    """Refuse, with a VllmEnvError, two files of engine arguments that differ, as the model does when it is loaded."""
    ours, official = model / ENGINE_ARGS_NAME, model / OFFICIAL_ARGS
    if ours.is_file() and official.is_file() and (differing := _differing(ours, official)):
        raise VllmEnvError(
            f"{ours} and {official} differ: {', '.join(differing)}.",
            cause="Both hold the engine arguments, and one file must be the truth.",
            remedy=f"Put what is meant into {OFFICIAL_ARGS}, which Triton's OpenAI frontend reads too, and remove the other.",
        )


def _differing(one: Path, other: Path) -> list[str]:
    """Return the names of the engine arguments in which two files differ, or what is wrong with one."""
    documents: list[dict[str, object]] = []
    for file in (one, other):
        try:
            documents.append(json.loads(_read(file)))
        except (ValueError, RecursionError):
            return [f"{file.name} is not JSON"]
        if not isinstance(documents[-1], dict):
            return [f"{file.name} holds no JSON object"]
    first, second = documents
    return sorted(
        name for name in first.keys() | second.keys() if (name in first, first.get(name)) != (name in second, second.get(name))
    )


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except FileNotFoundError as error:
        raise VllmEnvError(f"{file} is missing.", cause="Triton loads no model without it.", remedy=_COPY) from error
    except UnicodeDecodeError as error:
        raise VllmEnvError(f"{file} is not UTF-8: {error}.", remedy="Write it as UTF-8.") from error
