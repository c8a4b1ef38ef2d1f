"""Types of the objects of Triton, vLLM and Prometheus, reduced to the members that we use.

They were read in these sources:

- python_backend, branch r24.10: src/pb_stub.cc, src/resources/triton_python_backend_utils.py
- vLLM 0.32.0: outputs.py, logprobs.py, v1/engine/async_llm.py, v1/engine/output_processor.py and
  renderers/base.py
- prometheus_client: metrics_core.py, samples.py

tools/vllm_contract.py looks in the sources of other versions for the members of vLLM's classes that
are declared here. The docstring of a class or method says "since 0.20" if earlier versions need not
have it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np


class Log(Protocol):
    """Takes log lines; ``base.triton.Log`` in the server."""

    def info(self, text: str) -> None:
        """Log an event of normal operation."""

    def warning(self, text: str) -> None:
        """Log something that an operator should look at."""

    def error(self, text: str) -> None:
        """Log a failure."""


class TritonTensor(Protocol):
    """``pb_utils.Tensor``."""

    def name(self) -> str:
        """Return the name of the input."""

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """Return the elements; strings are objects of type bytes."""


class ResponseSender(Protocol):
    """``pb_utils.InferenceResponseSender``; only ``base.triton.Channel`` has one."""

    def send(self, response: object = None, flags: int = 0) -> None:
        """Send a response; blocks until the server has confirmed it."""

    def is_cancelled(self) -> bool:
        """Ask the server whether the request is cancelled.

        Once the final response is on its way, the question crashes the server.
        """


class TritonRequest(Protocol):
    """``pb_utils.InferenceRequest``."""

    def inputs(self) -> Sequence[TritonTensor]:
        """Return the input tensors."""

    def parameters(self) -> str:
        """Return the request parameters as a JSON object, or an empty string."""

    def trace(self) -> Any:
        """Return the server's trace of the request; its ``get_context`` returns JSON or None.

        24.10 has it. Older servers may lack it.
        """

    def timeout(self) -> int:
        """Return the timeout in microseconds."""

    def get_response_sender(self) -> ResponseSender:
        """Return the sender for the request's responses."""


class ModelConfig(Protocol):
    """``pb_utils.ModelConfig``."""

    def as_dict(self) -> Mapping[str, Any]:
        """Return config.pbtxt as a JSON object."""

    def add_input(self, input: Mapping[str, Any]) -> None:  # noqa: A002 - Triton's name
        """Declare an input."""

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Declare an output."""

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, bool]) -> None:
        """Set whether a request may have any number of responses."""

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set how many requests the server may batch."""


class Metric(Protocol):
    """``pb_utils.Metric``; each call is a round trip."""

    def increment(self, value: float) -> None:
        """Raise a counter."""

    def set(self, value: float) -> None:
        """Set a gauge."""


class PrometheusSample(Protocol):
    """``prometheus_client.samples.Sample``."""

    name: str
    """Its name in the exposition."""
    labels: Mapping[str, object]
    """Its labels."""
    value: float
    """Its value."""


class PrometheusFamily(Protocol):
    """``prometheus_client.metrics_core.Metric``."""

    name: str
    """Its name, without the suffixes of the samples."""
    type: str
    """Its kind: counter, gauge, histogram or summary, among others."""
    documentation: str
    """Its help text."""
    samples: Sequence[PrometheusSample]
    """Its values."""


class Logprob(Protocol):
    """``vllm.logprobs.Logprob``."""

    logprob: float
    """The token's log probability; may be minus infinity."""
    rank: int | None
    """The token's rank, from 1 on."""
    decoded_token: str | None
    """The token's text."""


Positions = Iterable["Mapping[int, Logprob] | None"]
"""A mapping of token ids to log probabilities for each token; None for a prompt's first."""


class CompletionOutput(Protocol):
    """``vllm.outputs.CompletionOutput``: the new part of one of a request's completions."""

    index: int
    """The number of the completion, below ``n``."""
    text: str
    """The new text."""
    token_ids: Sequence[int]
    """The new tokens."""
    logprobs: Positions | None
    """Their log probabilities, if asked for."""
    cumulative_logprob: float | None
    """The sum of the log probabilities of all tokens, if asked for."""
    finish_reason: str | None
    """Why the completion has ended; None until then."""
    stop_reason: int | str | None
    """The stop string or token."""


class RequestOutput(Protocol):
    """``vllm.outputs.RequestOutput``."""

    outputs: Sequence[CompletionOutput]
    """The completions that have a new part."""
    finished: bool
    """Whether this is the request's last output."""
    prompt_token_ids: Sequence[int] | None
    """The prompt's tokens."""
    num_cached_tokens: int | None
    """How many of the prompt's tokens came from the prefix cache."""
    prompt_logprobs: Positions | None
    """The log probabilities of the prompt's tokens, if asked for."""


class Pooled(Protocol):
    """A ``torch.Tensor`` of pooled numbers."""

    def numel(self) -> int:
        """Return how many numbers there are."""

    def tolist(self) -> Any:
        """Return the numbers in lists that are nested as the tensor's shape."""


class PoolingOutput(Protocol):
    """``vllm.outputs.PoolingOutput``."""

    data: Pooled
    """The pooled numbers."""


class PoolingRequestOutput(Protocol):
    """``vllm.outputs.PoolingRequestOutput``; a request has one."""

    outputs: PoolingOutput
    """The result."""
    finished: bool
    """Whether this is the request's last output; always true."""
    prompt_token_ids: Sequence[int]
    """The input's tokens."""


Inputs = Mapping[str, "np.ndarray[Any, Any]"]
"""A request's tensors by name."""
Tensors = list[tuple[str, "np.ndarray[Any, Any]"]]
"""A response's tensors with their names."""
Output = RequestOutput | PoolingRequestOutput


class Collector(Protocol):
    """``vllm.v1.engine.output_processor.RequestOutputCollector``."""

    put: Callable[[Output | Exception], None]

    def get_nowait(self) -> Output | None:
        """Return the outputs so far; if an exception was put, raise it."""


class Renderer(Protocol):
    """``vllm.renderers.base.BaseRenderer``, since 0.20."""

    def render_cmpl(self, prompts: Sequence[Any]) -> Sequence[Any]:
        """Tokenize in this thread."""

    def render_cmpl_async(self, prompts: Sequence[Any]) -> Awaitable[Sequence[Any]]:
        """Tokenize in one of vLLM's threads."""

    def render_chat_async(
        self, conversations: Sequence[Any], chat_params: Any
    ) -> Awaitable[tuple[Any, Sequence[Any]]]:
        """Apply the chat template, then tokenize."""


class EngineClient(Protocol):
    """``vllm.v1.engine.async_llm.AsyncLLM``."""

    model_config: Any
    """The model as vLLM describes it."""

    async def get_supported_tasks(self) -> Sequence[str]:
        """Return what the model can do: "generate", "embed" and others."""

    def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        """Add a request and return its outputs."""

    def encode(self, prompt: Any, pooling_params: Any, request_id: str) -> AsyncIterator[Any]:
        """Add a request for pooling and return its output."""

    async def add_lora(self, lora_request: Any) -> object:
        """Load an adapter."""

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        *,
        lora_request: Any,
        priority: int,
        **options: Any,
    ) -> Collector:
        """Begin a request; its outputs are put into the collector."""

    async def abort(self, request_id: str) -> None:
        """Stop a request; an unknown id is ignored."""

    async def check_health(self) -> None:
        """Raise an exception if the engine is not healthy."""

    async def is_sleeping(self) -> bool:
        """Ask EngineCore whether it sleeps."""

    async def sleep(self, level: int) -> None:
        """Pause EngineCore; from level 1 on this frees its devices' memory."""

    async def wake_up(self) -> object:
        """End the sleep."""

    async def reset_prefix_cache(self) -> object:
        """Drop cached prefixes; return whether that was possible."""

    def get_tokenizer(self) -> Any:
        """Return the tokenizer; it must be awaited before 0.20."""

    def shutdown(self) -> None:
        """End vLLM's processes."""
