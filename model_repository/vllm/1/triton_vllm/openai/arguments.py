"""Read ``vllm_openai_args.json``: the arguments of vLLM's server that its engine does not have."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.coerce import closest, coerce
from triton_vllm.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from triton_vllm.vllm_api import Vllm

FILE_NAME = "vllm_openai_args.json"
OURS: Mapping[str, str] = {
    "api_key": "set VLLM_API_KEY in the server's environment",
    "api_server_count": "instance_group in config.pbtxt has the number of front ends",
    "config": "this file has the arguments",
    "data_parallel_supervisor_port": "Triton starts the processes",
    "enable_auto_tool_choice": "tool_parser in {file} turns it on",
    "enable_scale_out": "its paths are not served",
    "enable_ssl_refresh": "load the model again after a change of its certificate",
    "enable_tokenizer_info_endpoint": "its path is not served",
    "grpc": "Triton has a gRPC endpoint",
    "grpc_port": "Triton has a gRPC endpoint",
    "headless": "the model always has its own front end",
    "host": "set OPENAI_HOST in config.pbtxt",
    "lora_modules": "multi_lora.json or LORA_DIRECTORY has the adapters",
    "middleware": "only the model's own checks stand before vLLM",
    "model_tag": "{file} names the model",
    "port": "set OPENAI_PORT in config.pbtxt",
    "root_path": "paths are served as they are",
    "served_model_name": "it is the model's name in Triton",
    "tokens_only": "its paths are not served",
    "tool_parser_plugin": "it would hold for one of the two APIs only",
    "tool_server": "it runs programs for clients",
    "trust_request_chat_template": "a template is a program",
    "trust_request_mm_kwargs": "requests cannot set them",
    "uds": "set OPENAI_HOST and OPENAI_PORT in config.pbtxt",
}
"""Arguments that this model sets or refuses, with what to do instead.

``{file}`` stands for the file with the engine's arguments.
"""
# Otherwise any client could write into Triton's log.
DEFAULTS: Mapping[str, Any] = {"uvicorn_log_level": "error", "disable_uvicorn_access_log": True}
"""Arguments whose default is not vLLM's."""


def read(model_dir: Path, vllm: Vllm, common: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return the arguments in ``vllm_openai_args.json``, and ``DEFAULTS`` for others.

    Args:
        model_dir: the folder with ``config.pbtxt``. It may lack the file.
        vllm: the loaded vLLM.
        common: the arguments that count for both APIs.
        file: the file with the values of ``common``: the one with the engine's arguments.

    Raises:
        ConfigError: the file is not a JSON object, or has an argument that is unknown, wrong, the
            model's own, or differs from the one for both APIs.
    """
    declared = vllm_api.server_arg_types(vllm)
    values = dict(DEFAULTS)
    for name, value in _read_object(model_dir / FILE_NAME).items():
        if name in common:
            if value != common[name]:
                # The engine's file has our name for this argument, and takes vLLM's name, too.
                name_in_file = "tool_parser" if name == "tool_call_parser" else "it"
                raise ConfigError(
                    f"{FILE_NAME}: {name} differs from {file}, whose value counts for both APIs: "
                    f"set {name_in_file} there, and leave {name} out here"
                )
        elif name in OURS:
            remedy = OURS[name].format(file=file)
            raise ConfigError(f"{FILE_NAME}: {name} cannot be set here: {remedy}")
        elif name not in declared:
            raise ConfigError(
                f"{FILE_NAME}: vLLM's server has no argument '{name}' that its engine does not have"
                f"{closest(name, declared)}"
            )
        # null: vLLM's default, or ours.
        elif value is not None:
            values[name] = _coerced(name, value, declared[name])
    return values


def _coerced(name: str, value: Any, hint: Any) -> Any:
    """Return an argument's value as the type that vLLM declares; raise ConfigError if it is wrong.

    ``hint`` is that type.
    """
    try:
        return coerce(value, hint)
    except ValueError as error:
        raise ConfigError(f"{FILE_NAME}: {name} {error}") from None


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is no such file.

    Raises:
        ConfigError: the file cannot be read, or is not a JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.name} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path.name} must hold a JSON object, not {type(values).__name__}")
    return values
