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
    """A declared tensor.

    Attributes:
        dims: as in config.pbtxt, without a batch dimension.
        content: for docs/tensors.md, which tools/reference.py writes.
        is_official: whether Triton's own vLLM backend has it, with the same type and shape.
    """

    name: str
    data_type: str
    dims: tuple[int, ...]
    content: str
    is_official: bool = False

    def declaration(self) -> dict[str, Any]:
        """Return the tensor as Triton's ModelConfig takes it."""
        return {"name": self.name, "data_type": self.data_type, "dims": list(self.dims)}


STRING = "TYPE_STRING"
BOOL = "TYPE_BOOL"
INT64 = "TYPE_INT64"
UINT32 = "TYPE_UINT32"
FP32 = "TYPE_FP32"
ONE = (1,)
ANY = (-1,)
OFFICIAL = True

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

# All inputs are optional, so the official backend's clients work unchanged.
PROMPT_INPUTS = (
    Tensor("text_input", STRING, ONE, "the prompt", OFFICIAL),
    # With INT32, Triton truncates JSON integers: 2^32 + 5 was served as 5.
    Tensor("prompt_token_ids", INT64, ANY, "the prompt as token ids"),
    Tensor(
        "sampling_parameters",
        STRING,
        ONE,
        "a JSON object with vLLM's sampling parameters, and `lora_name`",
        OFFICIAL,
    ),
    Tensor(
        "stream",
        BOOL,
        ONE,
        "true: send tokens as they come, on `/generate_stream` or gRPC; "
        "false, the default: send the whole answer",
        OFFICIAL,
    ),
    Tensor(
        "exclude_input_in_output",
        BOOL,
        ONE,
        "leave the prompt out of the answer; the default is true in a stream, else false",
        OFFICIAL,
    ),
    # Triton reserves these two names among the request parameters. As tensors they get through.
    Tensor(
        "priority",
        INT64,
        ONE,
        'a lower value runs first, with the engine argument `"scheduling_policy": "priority"`',
    ),
    Tensor("timeout", INT64, ONE, "microseconds until the request ends with an error"),
)
CHAT_INPUTS = (
    Tensor("messages", STRING, ANY, "a chat in JSON"),
    Tensor("tools", STRING, ONE, "the tools of a chat, a JSON list"),
    Tensor("tool_choice", STRING, ONE, "which tool a chat may call"),
    Tensor("parallel_tool_calls", BOOL, ONE, "false: at most one tool call"),
    Tensor("chat_template_kwargs", STRING, ONE, "a JSON object for the chat template"),
)
MEDIA_INPUTS = (
    Tensor("image", STRING, ANY, "pictures, each as base64 text", OFFICIAL),
    Tensor("audio", STRING, ANY, "recordings, each as base64 text"),
    Tensor("video", STRING, ANY, "videos, each as base64 text"),
)
MEDIA = tuple(tensor.name for tensor in MEDIA_INPUTS)
OTHER_INPUTS = (
    Tensor(
        "embedding_request",
        STRING,
        ONE,
        "a JSON object: embeddings, scores or ranks ([requests.md](requests.md))",
        OFFICIAL,
    ),
    Tensor(
        "operator_request",
        STRING,
        ONE,
        "a JSON object: sleep, wake up, load a LoRA adapter "
        "([scaling.md](scaling.md#operator-requests))",
    ),
)
FLAG_INPUTS = tuple(
    Tensor(name, BOOL, ONE, f"`{name.removeprefix('return_')}`", name in FLAGS)
    for name in (*FLAGS, *EXTRA_FLAGS)
)
INPUTS = (*PROMPT_INPUTS, *CHAT_INPUTS, *MEDIA_INPUTS, *OTHER_INPUTS, *FLAG_INPUTS)

# A response has those that are not official only if the request asks for them.
OUTPUTS = (
    Tensor(
        "text_output",
        STRING,
        ANY,
        "the text of each of the `n` completions; in a stream, the new part of it",
        OFFICIAL,
    ),
    Tensor(
        "finish_reason",
        STRING,
        ANY,
        "why the completion ended, such as `stop` or `length`; in a stream `None` before the end",
        OFFICIAL,
    ),
    Tensor("cumulative_logprob", FP32, ANY, "the sum of the log probabilities", OFFICIAL),
    Tensor("logprobs", STRING, ANY, "JSON for each completion", OFFICIAL),
    Tensor("num_input_tokens", UINT32, ONE, "the length of the prompt in tokens", OFFICIAL),
    Tensor(
        "num_output_tokens", UINT32, ANY, "tokens in this response, for each completion", OFFICIAL
    ),
    Tensor("token_ids", INT64, ANY, "the token ids of this response"),
    Tensor("stop_reason", STRING, ANY, "JSON: the stop string or token that ended the completion"),
    Tensor("prompt_logprobs", STRING, ONE, "JSON: the log probabilities of the prompt's tokens"),
    Tensor("kv_transfer_params", STRING, ONE, "JSON for a KV connector"),
    Tensor("tool_calls", STRING, ANY, "JSON for each completion of a chat"),
    Tensor("reasoning", STRING, ANY, "the reasoning of each completion of a chat"),
    Tensor(
        "num_cached_tokens", UINT32, ONE, "tokens of the prompt that came from the prefix cache"
    ),
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
