"""Read the engine arguments, and convert them to those of the installed vLLM.

They are in ``vllm_engine_args.json``, or in the official backend's ``1/model.json``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton_vllm.base.coerce import closest, coerce, to_bool
from triton_vllm.base.errors import ConfigError
from triton_vllm.base.official import ARGUMENTS_NAME

FILE_NAME = "vllm_engine_args.json"
_PATH_PREFIXES = ("/", "./", "../")
# Characters of vLLM's own message, which is nowhere else in the log.
_LONGEST_REASON = 1500

Replacement = Callable[[Any], Mapping[str, Any]]


def _renamed(name: str) -> Replacement:
    return lambda value: {name: value}


def _task(value: Any) -> Mapping[str, Any]:
    """Return ``runner`` and ``convert``, which replaced ``task`` (vLLM 0.10 to 0.14)."""
    pooling = {
        "embed": "embed",
        "embedding": "embed",
        "classify": "classify",
        "score": "classify",
        "reward": "none",
    }
    if value in ("auto", None):
        return {}
    if value in pooling:
        return {"runner": "pooling", "convert": pooling[value]}
    # The other tasks, such as "transcription", make text.
    return {"runner": "generate"}


def _structured(name: str) -> Replacement:
    return lambda value: {"structured_outputs_config": {name: value}}


# Arguments that vLLM removed, and their replacements today. Used only if the installed vLLM lacks
# the name.
REPLACEMENTS: Mapping[str, Replacement] = {
    # gone in vLLM 0.10
    "disable_log_requests": lambda v: {} if to_bool(v) else {"enable_log_requests": True},
    # gone by 0.14
    "task": _task,
    "guided_decoding_backend": _structured("backend"),
    "guided_decoding_disable_fallback": _structured("disable_fallback"),
    "guided_decoding_disable_any_whitespace": _structured("disable_any_whitespace"),
    "guided_decoding_disable_additional_properties": _structured("disable_additional_properties"),
    "worker_use_ray": lambda v: {"distributed_executor_backend": "ray"} if to_bool(v) else {},
    "disable_mm_preprocessor_cache": lambda v: {"mm_processor_cache_gb": 0} if to_bool(v) else {},
    "override_pooler_config": _renamed("pooler_config"),
    "cuda_graph_sizes": _renamed("cudagraph_capture_sizes"),
    "rope_scaling": lambda v: {"hf_overrides": {"rope_scaling": v}},
    "rope_theta": lambda v: {"hf_overrides": {"rope_theta": v}},
}
# Arguments that vLLM removed without a replacement. They are ignored with a warning.
REMOVED = frozenset(
    {
        "collect_model_forward_time",
        "collect_model_execute_time",
        "device",
        "disable_async_output_proc",
        "enable_multimodal_encoder_data_parallel",
        "enable_prompt_adapter",
        "enable_reasoning",
        "engine_use_ray",
        "fully_sharded_prompt_adapters",
        "long_lora_scaling_factors",
        "lora_extra_vocab_size",
        "max_context_len_to_capture",
        "max_log_len",
        "max_long_partial_prefills",
        "max_num_partial_prefills",
        "max_prompt_adapter_token",
        "max_prompt_adapters",
        "max_seq_len_to_capture",
        "multi_step_stream_outputs",
        "num_lookahead_slots",
        "num_scheduler_steps",
        "override_neuron_config",
        "preemption_mode",
        "qlora_adapter_name_or_path",
        "scheduler_delay_factor",
        "swap_space",
        "tokenizer_pool_extra_config",
        "tokenizer_pool_size",
        "tokenizer_pool_type",
        "use_v2_block_manager",
    }
)


@dataclass(frozen=True)
class EngineArgs:
    """Arguments as the installed vLLM takes them.

    Attributes:
        values: the arguments.
        warning: one line about arguments that vLLM no longer has; may be empty.
    """

    values: Mapping[str, Any]
    warning: str = ""


def place(model_dir: Path, version_dir: Path) -> Path:
    """Return the path that the arguments are read from; the file may be missing."""
    ours = model_dir / FILE_NAME
    official = version_dir / ARGUMENTS_NAME
    return official if official.is_file() and not ours.is_file() else ours


def read(model_dir: Path, version_dir: Path) -> Mapping[str, Any]:
    """Return the engine arguments that the model's folder has, with paths made absolute.

    Raises:
        ConfigError: the file is missing, is not JSON, is not an object or names no model. Also if
            both files exist and differ.
    """
    path = place(model_dir, version_dir)
    values = _read_object(path)
    official = version_dir / ARGUMENTS_NAME
    if path != official and official.is_file():
        theirs = _read_object(official)
        _refuse_difference(values, theirs, f"{version_dir.name}/{ARGUMENTS_NAME}")
    # vLLM would ask a model hub for a model of its own choice, or for one without a name.
    if values.get("model") in (None, ""):
        raise ConfigError(
            f'{path.relative_to(model_dir)}: "model" is missing; write the name of a model on the '
            'hub or a folder with weights, e.g. {"model": "facebook/opt-125m"}'
        )
    # A repository that brings its weights must work wherever it is mounted. So the name of a folder
    # in the model's directory becomes that folder's path.
    for key in ("model", "tokenizer"):
        name = values.get(key)
        # `strip` leaves nothing of "", "." and "..", which name no folder of the model's.
        if isinstance(name, str) and name.strip("./") and not name.startswith("/"):
            folder = model_dir / name
            # For a folder that may not be entered and for a name that is too long, os.path returns
            # False. Path.is_dir() raises.
            if os.path.isdir(folder):  # noqa: PTH112
                values[key] = str(folder)
    return values


def _read_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object.

    Raises:
        ConfigError: the file is missing, or has something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f'{path} is missing: write the engine arguments there, e.g. {{"model": "…"}}'
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} must hold a JSON object of engine arguments, not {type(values).__name__}"
        )
    return values


def _refuse_difference(ours: Mapping[str, Any], official: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError if our file differs from the official backend's, whose name is ``name``."""
    if ours == official:
        return
    # An argument that is null differs from one that is missing.
    missing = object()
    differing = sorted(
        key
        for key in ours.keys() | official.keys()
        if ours.get(key, missing) != official.get(key, missing)
    )
    shown = ", ".join(differing[:5]) + (", …" if len(differing) > 5 else "")
    raise ConfigError(
        f"{FILE_NAME} and {name} both hold engine arguments and differ ({shown[:200]}): "
        f"put the right ones into {name}, which Triton's OpenAI frontend reads too, "
        f"and remove {FILE_NAME}"
    )


def fit(
    arguments: Mapping[str, Any], declared: Mapping[str, Any], file: str = FILE_NAME
) -> EngineArgs:
    """Convert arguments to those that the installed vLLM declares.

    Args:
        arguments: the arguments of the file.
        declared: vLLM's arguments with their type hints.
        file: the file's name in errors.

    Raises:
        ConfigError: no vLLM ever had an argument of this name, or a value has the wrong type.
    """
    # 1) Replace the arguments that this vLLM does not have.
    wanted = {name: value for name, value in arguments.items() if name in declared}
    notes: list[str] = []
    for name, old_value in arguments.items():
        if name in declared:
            continue
        replacement = _replace(name, old_value, declared, file)
        notes.append(f"{name} -> {', '.join(replacement) or 'ignored'}")
        for key, item in replacement.items():
            # A value that the file has under today's name wins. Objects are merged.
            present = wanted.get(key)
            if isinstance(item, dict) and isinstance(present, dict):
                wanted[key] = item | present
            else:
                wanted.setdefault(key, item)
    warning = f"engine arguments that this vLLM no longer has: {'; '.join(notes)}" if notes else ""
    # 2) Convert the values to the declared types. JSON's null means vLLM's default, whatever the
    #    type is.
    values = {
        name: _coerced(name, value, declared[name], file)
        for name, value in wanted.items()
        if value is not None
    }
    return EngineArgs(values, warning)


# A hub's error comes through several libraries, which raise other classes with other texts. So the
# texts are searched.
_NO_HUB = re.compile(
    r"couldn't connect to|OfflineModeIsEnabled|offline mode is enabled|LocalEntryNotFound"
    r"|cannot find the requested files|outgoing traffic has been disabled|Max retries exceeded"
    r"|ConnectionError|ConnectError|Name or service not known"
)
_NOT_ON_HUB = re.compile(
    r"RepositoryNotFound|GatedRepo|not a valid model identifier|gated repo|401 Client|404 Client"
)


def unfetched(values: Mapping[str, Any], error: BaseException, file: str = FILE_NAME) -> str:
    """Return one line if the model could not be fetched from a model hub, else an empty string."""
    model = str(values.get("model", ""))
    # For a path, no hub was asked.
    if model.startswith(_PATH_PREFIXES):
        return ""
    # The hub's error may be anywhere in the chain. The limit is for a chain that leads back to
    # itself.
    messages: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(messages) < 20:
        messages.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(messages)
    if _NO_HUB.search(text):
        return (
            f"model '{model}': no model hub answers; "
            f"name a folder with its weights in {file}, or set HF_ENDPOINT"
        )
    if _NOT_ON_HUB.search(text):
        remedy = f"check the name in {file}, and set HF_TOKEN if it is private"
        return f"model '{model}' was not found on the model hub, or may not be read; {remedy}"
    return ""


def failure(
    values: Mapping[str, Any], error: Exception, file: str = FILE_NAME, cause: str = ""
) -> str:
    """Return one line for Triton's status on why vLLM did not start with these arguments.

    Args:
        values: the arguments.
        error: the exception that vLLM raised.
        file: where the arguments were read.
        cause: the error in vLLM's processes, if ``error`` only says that there was one.
    """
    model = str(values.get("model", ""))
    if model.startswith(_PATH_PREFIXES) and not os.path.exists(model):  # noqa: PTH110
        return f"{file}: model: there is no directory {model}"
    # pydantic's message ends with the whole input and a link. Triton shows the reason on one line.
    message = " ".join(str(error).partition("[type=")[0].split())
    reason = cause or f"{type(error).__name__}: {message[:_LONGEST_REASON]}"
    return f"vLLM did not start with the arguments of {file}, model '{model}': {reason}"


def _replace(name: str, value: Any, declared: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    """Return this vLLM's arguments for one that it lacks; empty if the argument is ignored.

    Raises:
        ConfigError: no vLLM ever had an argument ``name``, or its value is of the wrong type.
    """
    if name in REMOVED:
        return {}
    if name not in REPLACEMENTS:
        raise ConfigError(f"{file}: vLLM has no engine argument '{name}'{closest(name, declared)}")
    try:
        replacement = REPLACEMENTS[name](value)
    except ValueError as error:
        raise ConfigError(f"{file}: {name} {error}") from None
    # This vLLM may be older than the replacement.
    return {key: item for key, item in replacement.items() if key in declared}


def _coerced(name: str, value: Any, hint: Any, file: str) -> Any:
    try:
        return coerce(value, hint)
    except ValueError as error:
        raise ConfigError(f"{file}: {name} {error}") from None
