"""The tensors of the model: the official vLLM backend's, and our optional additions.

``complete`` adds them to a model's configuration, so that ``config.pbtxt`` need not list them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.base.protocols import ModelConfig


@dataclass(frozen=True)
class Tensor:
    """A declared tensor; ``dims`` are as in config.pbtxt: -1 is any size, no batch dimension."""

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)

    def declaration(self) -> dict[str, Any]:
        """Return the tensor as Triton's ModelConfig takes it."""
        return {"name": self.name, "data_type": self.data_type, "dims": list(self.dims)}


STRING = "TYPE_STRING"
BOOL = "TYPE_BOOL"
INT64 = "TYPE_INT64"
UINT32 = "TYPE_UINT32"
FP32 = "TYPE_FP32"

FLAGS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
)
EXTRA_FLAGS = (
    "return_token_ids",
    "return_stop_reason",
    "return_prompt_logprobs",
    "return_kv_transfer_params",
    "return_num_cached_tokens",
)
MEDIA = ("image", "audio", "video")

INPUTS = (
    Tensor("text_input", STRING),
    Tensor("image", STRING, (-1,)),
    Tensor("stream", BOOL),
    Tensor("sampling_parameters", STRING),
    Tensor("exclude_input_in_output", BOOL),
    *(Tensor(name, BOOL) for name in FLAGS),
    Tensor("embedding_request", STRING),
    # Our additions. All are optional, so the official backend's clients work unchanged.
    Tensor("messages", STRING, (-1,)),
    Tensor("tools", STRING),
    Tensor("tool_choice", STRING),
    Tensor("parallel_tool_calls", BOOL),
    Tensor("chat_template_kwargs", STRING),
    # With INT32, Triton truncates JSON integers: 2^32 + 5 was served as 5.
    Tensor("prompt_token_ids", INT64, (-1,)),
    Tensor("operator_request", STRING),
    Tensor("audio", STRING, (-1,)),
    Tensor("video", STRING, (-1,)),
    # Triton reserves these two names among the request parameters. As tensors they get through.
    Tensor("priority", INT64),
    Tensor("timeout", INT64),
    *(Tensor(name, BOOL) for name in EXTRA_FLAGS),
)

OUTPUTS = (
    Tensor("text_output", STRING, (-1,)),
    Tensor("finish_reason", STRING, (-1,)),
    Tensor("cumulative_logprob", FP32, (-1,)),
    Tensor("logprobs", STRING, (-1,)),
    Tensor("num_input_tokens", UINT32),
    Tensor("num_output_tokens", UINT32, (-1,)),
    # Our additions. A response has them only if the request asks for them.
    Tensor("token_ids", INT64, (-1,)),
    Tensor("stop_reason", STRING, (-1,)),
    Tensor("prompt_logprobs", STRING),
    Tensor("kv_transfer_params", STRING),
    Tensor("tool_calls", STRING, (-1,)),
    Tensor("reasoning", STRING, (-1,)),
    Tensor("num_cached_tokens", UINT32),
)


def require_completed(model_config: Mapping[str, Any]) -> None:
    """Check that the configuration declares the tensors, by the file or by the server's completion.

    Raises:
        ConfigError: a declaration is missing that every request needs, or the server would batch.
    """
    _refuse_batches(model_config)
    tensors = [*(model_config.get("input") or ()), *(model_config.get("output") or ())]
    declared = {tensor["name"] for tensor in tensors}
    lacking = [name for name in ("text_input", "text_output") if name not in declared]
    # Without this policy, Triton takes exactly one response for each request.
    if not (model_config.get("model_transaction_policy") or {}).get("decoupled"):
        lacking.append("model_transaction_policy { decoupled: true }")
    if lacking:
        raise ConfigError(
            f"config.pbtxt lacks {', '.join(lacking)}, and the server does not complete it: "
            "start tritonserver without --disable-auto-complete-config"
        )


def complete(config: ModelConfig) -> ModelConfig:
    """Add the tensors and the decoupled policy that ``config`` lacks; return it.

    Raises:
        ConfigError: the server would batch.
    """
    declared = config.as_dict()
    _refuse_batches(declared)
    # A declaration in the file stays as it is: Triton refuses a second one that differs.
    known_inputs = {tensor["name"] for tensor in declared["input"]}
    for tensor in INPUTS:
        if tensor.name not in known_inputs:
            config.add_input({**tensor.declaration(), "optional": True})
    known_outputs = {tensor["name"] for tensor in declared["output"]}
    for tensor in OUTPUTS:
        if tensor.name not in known_outputs:
            config.add_output(tensor.declaration())
    config.set_model_transaction_policy({"decoupled": True})
    # The declared shapes have no batch dimension.
    config.set_max_batch_size(0)
    return config


def _refuse_batches(declared: Mapping[str, Any]) -> None:
    """Raise ConfigError if the server is to make batches; the message of Triton helps nobody."""
    size = declared.get("max_batch_size") or 0
    if size:
        raise ConfigError(
            f"config.pbtxt: max_batch_size is {size}: write max_batch_size: 0, because vLLM makes "
            "the batches itself (engine argument max_num_seqs)"
        )
