"""Read the ``parameters`` of config.pbtxt that the adapter knows."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from triton_vllm.base import official
from triton_vllm.base.coerce import to_bool, to_float, to_int
from triton_vllm.base.dialect import OFFICIAL, OURS, Dialect
from triton_vllm.base.errors import ConfigError
from triton_vllm.base.limits import USUAL, Limits
from triton_vllm.operator.request import OPERATIONS
from triton_vllm.request.engine_fields import ENGINE_FIELDS
from triton_vllm.startup.misspelt import meant

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping


@dataclass(frozen=True)
class Settings:
    """How the model is served; ``tools/reference.py`` writes these texts into docs/parameters.md.

    Attributes:
        metrics: REPORT_CUSTOM_METRICS. Publish vLLM's metrics on Triton's metrics endpoint, with
            the labels ``model`` and ``version`` in addition to vLLM's.
        dialect: COMPATIBILITY. ``official``: behave as Triton's own vLLM backend where vllm-env
            differs on purpose.
        health_check: ENABLE_VLLM_HEALTH_CHECK. Ask vLLM's ``check_health()`` before each request.
            If it fails or the engine is dead, unload the model, or start the engine again if
            ``RESTART_DEAD_ENGINE`` is ``true``. To unload, the server needs
            ``--model-control-mode=explicit``.
        restart: RESTART_DEAD_ENGINE. Start a dead engine again in the background. Requests get
            UNAVAILABLE meanwhile. Without an entry, it is off with ``ENABLE_VLLM_HEALTH_CHECK`` =
            ``true`` and with ``COMPATIBILITY`` = ``official``.
        gpu_ids: GPU_DEVICE_IDS. The GPUs of the model, such as ``0,1``, in place of the server's
            ``CUDA_VISIBLE_DEVICES``. If empty, vLLM chooses.
        unload_grace_s: UNLOAD_GRACE_SECONDS. How long requests in flight may continue when the
            server ends. While the server runs, Triton unloads a model only after its last request.
        engine_timeout_s: ENGINE_TIMEOUT_SECONDS. If requests are open and the engine is silent for
            this long, it is restarted. 0: automatic, after 60 s if engine and GPU are idle, after
            300 s otherwise.
        senders: RESPONSE_SENDER_THREADS. Threads that send responses, at most 16. With 0, the
            number of cores decides.
        lora_directory: LORA_DIRECTORY. A folder with one subfolder for each LoRA adapter. Empty: no
            such folder.
        openai_port: OPENAI_PORT. The port of vLLM's own OpenAI server over the same engine. Not one
            of Triton's ports. 0: no such server.
        openai_host: OPENAI_HOST. The address of that port. If other machines can reach it,
            ``VLLM_API_KEY`` must be in the server's environment.
        openai_without_key: OPENAI_WITHOUT_KEY. Let other machines reach that port without a key.
        limits: limits of requests. Each is a parameter with its name in capitals.
    """

    metrics: bool = False
    dialect: Dialect = OURS
    health_check: bool = False
    restart: bool = True
    gpu_ids: tuple[int, ...] = ()
    unload_grace_s: float = 20.0
    engine_timeout_s: float = 0.0
    senders: int = 0
    lora_directory: str = ""
    openai_port: int = 0
    openai_host: str = "127.0.0.1"
    openai_without_key: bool = False
    limits: Limits = USUAL


TO_TOKENIZER = frozenset({
    "chat_template", "max_length", "padding", "padding_side", "processor_kwargs",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs",
    "truncation",
})  # fmt: skip
"""Arguments of a template that transformers itself interprets.

Each would let a request set a program or a length.
"""


def read(model_config: Mapping[str, Any]) -> Settings:
    """Read the settings from Triton's model configuration.

    Raises:
        ConfigError: a value is of the wrong type, or a name is misspelt.
    """
    parameters = model_config.get("parameters") or {}
    # An empty value counts as not set.
    texts = {
        name: entry["string_value"]
        for name, entry in parameters.items()
        if entry.get("string_value")
    }
    # The names that `value` was asked for: all names of ours.
    known: set[str] = set()

    def value(name: str, convert: Callable[[str], Any], default: Any) -> Any:
        """Return a parameter's converted text, or ``default`` if it is not set."""
        known.add(name)
        if name not in texts:
            return default
        try:
            return convert(texts[name])
        except ValueError as error:
            raise ConfigError(f"config.pbtxt: parameter {name} {error}") from None

    # Each limit is a number, but for those in `_LISTS`.
    limits = {
        field.name: value(field.name.upper(), _LISTS.get(field.name, _limit), field.default)
        for field in fields(Limits)
    }
    settings = Settings(
        metrics=value("REPORT_CUSTOM_METRICS", to_bool, Settings.metrics),
        dialect=value("COMPATIBILITY", _dialect, Settings.dialect),
        health_check=value("ENABLE_VLLM_HEALTH_CHECK", to_bool, Settings.health_check),
        restart=value("RESTART_DEAD_ENGINE", to_bool, Settings.restart),
        gpu_ids=value("GPU_DEVICE_IDS", _gpu_ids, Settings.gpu_ids),
        unload_grace_s=value("UNLOAD_GRACE_SECONDS", to_float, Settings.unload_grace_s),
        engine_timeout_s=value("ENGINE_TIMEOUT_SECONDS", _seconds, Settings.engine_timeout_s),
        senders=value("RESPONSE_SENDER_THREADS", _senders, Settings.senders),
        lora_directory=value("LORA_DIRECTORY", str, Settings.lora_directory),
        openai_port=value("OPENAI_PORT", _port, Settings.openai_port),
        openai_host=value("OPENAI_HOST", str, Settings.openai_host),
        openai_without_key=value("OPENAI_WITHOUT_KEY", to_bool, Settings.openai_without_key),
        limits=Limits(**limits),
    )
    _refuse_misspelt(parameters, known)
    if "RESTART_DEAD_ENGINE" in texts:
        return settings
    # If a dead engine came back, the health check would never fail. The official backend never
    # restarts one: it unloads the model.
    if settings.health_check or settings.dialect.is_official:
        return replace(settings, restart=False)
    return settings


def _refuse_misspelt(names: Iterable[str], known: Collection[str]) -> None:
    """Refuse names that are nearly ours; Triton and other programs have parameters here, too."""
    for name in names:
        right = None if name in known else meant(name, sorted(known))
        if right:
            raise ConfigError(
                f"config.pbtxt: there is no parameter {name}, did you mean {right}? "
                "If another program reads it, give it a name that is less similar."
            )


def _dialect(text: str) -> Dialect:
    if text != official.DIALECT_NAME:
        raise ValueError(f"must be {official.DIALECT_NAME} or empty, not {text}")
    return OFFICIAL


def _limit(text: str) -> int:
    number = to_int(text)
    if number < 0:
        raise ValueError(f"must not be negative, not {number}; 0 is no limit")
    return number


def _seconds(text: str) -> float:
    number = to_float(text)
    if not 0 <= number < math.inf:
        raise ValueError(f"must be a number of seconds, not {text}")
    return number


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _domains(text: str) -> tuple[str, ...]:
    """Return the host names in a comma-separated list, in lower case.

    Raises:
        ValueError: an entry is not a host name.
    """
    # A request's host name is compared in lower case, too (``media.checks``).
    names = _names(text.lower())
    for name in names:
        # An entry with a scheme, a port or a path would never match a host name.
        if not re.fullmatch(r"[a-z0-9.-]+", name):
            raise ValueError(
                f"must be comma-separated host names such as images.example.com, not '{name}'"
            )
    return names


def _template_kwargs(text: str) -> tuple[str, ...]:
    """Return the names of a chat template's arguments in a comma-separated list.

    Raises:
        ValueError: a name is one of ``TO_TOKENIZER``.
    """
    names = _names(text)
    for name in names:
        if name in TO_TOKENIZER:
            raise ValueError(
                f"must not name '{name}', which transformers reads instead of the template"
            )
    return names


def _some_of(known: Collection[str], text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list.

    Raises:
        ValueError: a name is not one of ``known``.
    """
    names = _names(text)
    for name in names:
        # A misspelt name would allow nothing, without a word.
        if name not in known:
            raise ValueError(
                f"must name some of {', '.join(known)}, separated by commas, not '{name}'"
            )
    return names


_LISTS: Mapping[str, Callable[[str], tuple[str, ...]]] = {
    "allowed_media_domains": _domains,
    "allowed_chat_template_kwargs": _template_kwargs,
    "allowed_request_fields": partial(_some_of, ENGINE_FIELDS),
    "operator_requests": partial(_some_of, OPERATIONS),
}


def _port(text: str) -> int:
    number = to_int(text)
    if not 0 <= number <= 65_535:
        raise ValueError(f"must be between 0 and 65535, not {number}; 0 is no port")
    return number


def _senders(text: str) -> int:
    number = to_int(text)
    if not 0 <= number <= 16:
        raise ValueError(f"must be between 0 and 16, not {number}")
    return number


def _gpu_ids(text: str) -> tuple[int, ...]:
    """Return the GPUs in a comma-separated list.

    The parameter is the official backend's, so the messages are its, too.

    Raises:
        ConfigError: an entry is not a number. The message is a sentence of its own.
        ValueError: a number is negative or repeated. The message follows the parameter's name.
    """
    try:
        ids = tuple(map(int, text.split(",")))
    except ValueError:
        raise ConfigError(
            f"config.pbtxt: Invalid value for GPU_DEVICE_IDS: '{text}'. "
            "Expected a comma-separated list of integer GPU IDs (e.g., '0,1,2')."
        ) from None
    negative = [number for number in ids if number < 0]
    if negative:
        raise ValueError(
            f"contains invalid GPU ID(s): {negative}. GPU IDs must be non-negative integers."
        )
    repeated = sorted({number for number in ids if ids.count(number) > 1})
    if repeated:
        raise ValueError(f"contains duplicate GPU ID(s): {repeated}. Each GPU ID must be unique.")
    return ids
