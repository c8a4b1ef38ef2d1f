"""Stands for vLLM in unit tests of the model: an engine that answers a prompt with its words, one token a word.

`install()` puts it where `triton_vllm.vllm_api.load` looks. A prompt is answered by the loop that the engine was started in.
This file is also a part of the package `vllm` that `support.engineless` puts into an environment, so it imports no other.
"""

from __future__ import annotations

import asyncio
import enum
import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class RequestOutputKind(enum.Enum):
    """Which outputs a request gets."""

    DELTA, FINAL_ONLY = 1, 2


class EngineDeadError(Exception):
    """Raised by a dead engine."""


class UsageContext(enum.Enum):
    """Who uses vLLM."""

    API_SERVER = 1


@dataclass
class StructuredOutputsParams:
    """Constraints of an answer."""

    json: str | dict | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: str | None = None


class SamplingParams:
    """How to sample."""

    n: int
    max_tokens: int
    temperature: float
    output_kind: RequestOutputKind
    structured_outputs: StructuredOutputsParams | None
    logprobs: int | None
    prompt_logprobs: int | None
    min_tokens: int
    ignore_eos: bool
    stop: str | list[str] | None
    bad_words: list[str] | None
    stop_token_ids: list[int] | None
    allowed_token_ids: list[int] | None
    logprob_token_ids: list[int] | None
    logit_bias: dict[int, float] | None
    stream_interval: int | None
    __struct_fields__ = (
        "n", "max_tokens", "temperature", "output_kind", "structured_outputs", "logprobs", "prompt_logprobs", "min_tokens",
        "ignore_eos", "stop", "bad_words", "stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias",
        "stream_interval",
    )  # fmt: skip

    def __init__(self, **values: Any) -> None:
        self.n = 1
        vars(self).update(values)
        if values.get("temperature", 0) < 0:
            raise ValueError("temperature must be non-negative")


class PoolingParams:
    """How to pool."""

    task: str
    dimensions: int
    __struct_fields__ = ("task", "dimensions")

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


@dataclass
class LoRARequest:
    """An adapter."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class AsyncEngineArgs:
    """Engine arguments; `model` says how the engine behaves: "fails" does not start, others do."""

    model: str = "echo"
    distributed_executor_backend: str | None = None
    disable_log_stats: bool = False
    enable_lora: bool = False
    otlp_traces_endpoint: str | None = None


class Collector:
    """Holds what comes before the adapter takes over `put`."""

    def __init__(self) -> None:
        self.early: list[Any] = []
        self.put: Any = self.early.append

    def get_nowait(self) -> Any:
        return self.early.pop(0) if self.early else None


@dataclass
class AsyncLLM:
    """The engine."""

    args: AsyncEngineArgs
    errored: bool = False
    aborted: list[str] = field(default_factory=list)
    model_config: Any = None

    @classmethod
    def from_engine_args(cls, args: AsyncEngineArgs, usage_context: UsageContext) -> AsyncLLM:
        if args.model == "fails":
            raise RuntimeError("no memory")
        return cls(args)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, lora_request: Any = None, priority: int = 0
    ) -> Collector:
        collector = Collector()
        self._answers = asyncio.get_running_loop().create_task(_answer(collector, prompt["prompt"], params))
        return collector

    async def check_health(self) -> None:
        pass

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def shutdown(self) -> None:
        self.errored = True


async def _answer(collector: Collector, text: str, params: SamplingParams) -> None:
    words = text.split()
    streaming = params.output_kind is RequestOutputKind.DELTA
    pieces = words if streaming else [" ".join(words)]
    for number, piece in enumerate(pieces, start=1):
        await asyncio.sleep(0)
        collector.put(output(piece, finished=number == len(pieces)))


def output(text: str, *, finished: bool) -> SimpleNamespace:
    """Return a RequestOutput with one completion."""
    part = SimpleNamespace(
        index=0, text=text, token_ids=[len(text)], logprobs=None, cumulative_logprob=None,
        finish_reason="stop" if finished else None, stop_reason=None,
    )  # fmt: skip
    return SimpleNamespace(outputs=[part], finished=finished, prompt_token_ids=[1], prompt_logprobs=None)


def install(others: Mapping[str, Any] | None = None) -> ModuleType:
    """Put the modules where `import` finds them, with `others` added or in place of those here; return `vllm`."""
    path = getattr(sys.modules.get("vllm"), "__path__", ["/nowhere/vllm"])  # in an environment it is a package
    names: dict[str, Any] = {
        "vllm": SimpleNamespace(__version__="0.0", __path__=path),
        "vllm.engine.arg_utils": SimpleNamespace(AsyncEngineArgs=AsyncEngineArgs),
        "vllm.v1.engine.async_llm": SimpleNamespace(AsyncLLM=AsyncLLM),
        "vllm.usage.usage_lib": SimpleNamespace(UsageContext=UsageContext),
        "vllm.sampling_params": SimpleNamespace(
            SamplingParams=SamplingParams,
            RequestOutputKind=RequestOutputKind,
            StructuredOutputsParams=StructuredOutputsParams,
        ),
        "vllm.pooling_params": SimpleNamespace(PoolingParams=PoolingParams),
        "vllm.lora.request": SimpleNamespace(LoRARequest=LoRARequest),
        "vllm.v1.engine.exceptions": SimpleNamespace(EngineDeadError=EngineDeadError),
        "vllm.envs": SimpleNamespace(environment_variables={"VLLM_MAX_AUDIO_DECODE_DURATION_S": lambda: 600}),
        "vllm.platforms": SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: True, ray_device_key="")),
        **(others or {}),
    }
    for name, content in names.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:count]), ModuleType(".".join(parts[:count])))
        vars(sys.modules[name]).update(vars(content))
    # `importlib.util.find_spec` raises for a module without one
    sys.modules["vllm"].__spec__ = ModuleSpec("vllm", None)
    return sys.modules["vllm"]
