"""The names of vLLM that the adapter uses, and the modules that contain them in each version."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Each name with the modules that may contain it. We try them in this order, the newest first.
PLACES: Mapping[str, tuple[str, ...]] = {
    "AsyncEngineArgs": ("vllm.engine.arg_utils",),
    "AsyncLLM": ("vllm.v1.engine.async_llm",),
    "UsageContext": ("vllm.usage.usage_lib",),
    "SamplingParams": ("vllm.sampling_params",),
    "RequestOutputKind": ("vllm.sampling_params",),
    "StructuredOutputsParams": ("vllm.sampling_params",),
    "PoolingParams": ("vllm.pooling_params",),
    "LoRARequest": ("vllm.lora.request",),
    "EngineDeadError": ("vllm.v1.engine.exceptions",),
}
# The same for names that only some versions have.
OPTIONAL_PLACES: Mapping[str, tuple[str, ...]] = {
    "parse_model_prompt": ("vllm.renderers.inputs.preprocess",),  # since 0.20
    "VLLMClientError": ("vllm.exceptions",),  # the request is wrong
    "VLLMValidationError": ("vllm.exceptions",),
    "GracefulHTTPError": ("vllm.exceptions",),  # queue overflow (503), since 0.30
    # A request failed in EngineCore (since 0.30). It is put into the collector since 0.33.
    "GenerationError": ("vllm.exceptions",),
    # The same failure, but sending the request again may help (since 0.32).
    "RetryableRequestError": ("vllm.exceptions",),
    "ChatParams": ("vllm.renderers.params", "vllm.renderers"),  # since 0.20
    "ThreadSafeHFTokenizerMixin": ("vllm.tokenizers.hf",),  # since 0.22
    "ImageMediaIO": ("vllm.multimodal.media", "vllm.multimodal.image"),
    "AudioMediaIO": ("vllm.multimodal.media", "vllm.multimodal.audio"),
    "VideoMediaIO": ("vllm.multimodal.media", "vllm.multimodal.video"),
    "UniProcExecutor": ("vllm.v1.executor.uniproc_executor",),
    "enable_envs_cache": ("vllm.envs",),
    "disable_envs_cache": ("vllm.envs",),
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": ("vllm.envs",),
    "DEFAULT_LOGGING_CONFIG": ("vllm.logger",),
    "set_torch_threads_for_runtime": ("vllm.utils.torch_utils",),
}


@dataclass(frozen=True)
class Vllm:
    """What the adapter uses of the installed vLLM.

    Fields that are not listed here have vLLM's own names.

    Attributes:
        refusals: vLLM's exceptions for wrong requests.
        client_errors: ``refusals``, and Python's exceptions for wrong values.
        busy_errors: exceptions of a full queue. Empty before 0.30.
        failures: one request has failed.
        passing_failures: one request has failed, and may be sent again.
        media_io: vLLM's decoder of each kind of media.
        step_timeout_s: after how many seconds without an answer to a step vLLM takes a worker to
            be lost.
        logging_config: vLLM's own logging configuration.
        limits_threads: whether vLLM itself computes with one CPU thread of Torch on a GPU.
    """

    version: str
    path: str
    AsyncEngineArgs: Any
    AsyncLLM: Any
    UsageContext: Any
    SamplingParams: Any
    RequestOutputKind: Any
    StructuredOutputsParams: Any
    PoolingParams: Any
    LoRARequest: Any
    EngineDeadError: type[Exception]
    refusals: tuple[type[Exception], ...]
    client_errors: tuple[type[Exception], ...]
    busy_errors: tuple[type[Exception], ...]
    failures: tuple[type[Exception], ...]
    passing_failures: tuple[type[Exception], ...]
    parse_model_prompt: Any
    ChatParams: Any
    ThreadSafeHFTokenizerMixin: Any
    UniProcExecutor: Any
    enable_envs_cache: Callable[[], None] | None
    disable_envs_cache: Callable[[], None] | None
    media_io: Mapping[str, Any]
    step_timeout_s: float = 300.0
    logging_config: Mapping[str, Any] | None = None
    limits_threads: bool = True


def load() -> Vllm:
    """Import vLLM and find its parts.

    Raises:
        ImportError: vLLM is not found, or lacks a name that every supported version has.
    """
    vllm = importlib.import_module("vllm")
    required = {name: _find(name, places) for name, places in PLACES.items()}
    optional = {
        name: _find(name, places, required=False) for name, places in OPTIONAL_PLACES.items()
    }

    def present(*names: str) -> tuple[Any, ...]:
        """Return those of the optional names that this vLLM has."""
        return tuple(optional[name] for name in names if optional[name])

    refusals = present("VLLMClientError", "VLLMValidationError")
    return Vllm(
        version=str(getattr(vllm, "__version__", "unknown")),
        path=str(next(iter(vllm.__path__))),
        **required,
        refusals=refusals,
        client_errors=(*refusals, ValueError, TypeError, OverflowError),
        busy_errors=present("GracefulHTTPError"),
        failures=present("GenerationError"),
        passing_failures=present("RetryableRequestError"),
        parse_model_prompt=optional["parse_model_prompt"],
        ChatParams=optional["ChatParams"],
        ThreadSafeHFTokenizerMixin=optional["ThreadSafeHFTokenizerMixin"],
        UniProcExecutor=optional["UniProcExecutor"],
        enable_envs_cache=optional["enable_envs_cache"],
        disable_envs_cache=optional["disable_envs_cache"],
        step_timeout_s=float(optional["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] or Vllm.step_timeout_s),
        logging_config=optional["DEFAULT_LOGGING_CONFIG"],
        limits_threads=optional["set_torch_threads_for_runtime"] is not None,
        media_io={kind: optional[f"{kind.title()}MediaIO"] for kind in ("image", "audio", "video")},
    )


def _find(name: str, places: tuple[str, ...], *, required: bool = True) -> Any:
    """Return what a name stands for in the first of the modules that has it.

    If none has it, return None.

    Raises:
        ImportError: none has it, and it is required.
    """
    for place in places:
        try:
            return getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError):
            # Other versions have the name in another module.
            continue
    if required:
        raise ImportError(
            f"this vLLM has no {name} in {' or '.join(places)}; vLLM 0.11 to 0.33 are supported"
        )
    return None
