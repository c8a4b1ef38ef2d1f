"""Limit how much one request may ask for; a larger request is refused before it costs anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

MIB = 1 << 20
TEMPLATE_KWARGS = (
    "add_generation_prompt",
    "add_vision_id",
    "builtin_tools",
    "citations",
    "clear_thinking",
    "continue_final_message",
    "controls",
    "custom_tools",
    "date_string",
    "documents",
    "enable_thinking",
    "model_identity",
    "preserve_thinking",
    "reasoning_effort",
    "thinking",
    "thinking_budget",
    "thinking_mode",
    "tools_in_user_message",
    "xml_tools",
)
"""The variables that the chat templates of public models read."""


# vLLM uses these as indexes of tables that requests share.
TOKEN_IDS = (
    "allowed_token_ids",
    "logit_bias",
    "logprob_token_ids",
    "stop_token_ids",
    "trace_decode_token_ids",
)
"""Sampling parameters that contain token ids."""


@dataclass(frozen=True)
class Limits:
    """The limits of requests; 0 means no limit.

    Each field is the parameter of config.pbtxt with its name in capitals. ``tools/reference.py``
    writes these texts into docs/parameters.md.

    Attributes:
        max_requests_in_flight: requests whose answer is not complete. Each completion and each
            input of a request counts. A further request gets UNAVAILABLE at once.
        max_request_bytes: all inputs and parameters of a request.
        max_text_bytes: ``text_input``, ``prompt_token_ids``, ``embedding_request``, and
            ``messages`` without pictures, audio and video.
        max_parameter_bytes: each of ``sampling_parameters``, ``tools``, ``tool_choice``,
            ``chat_template_kwargs`` and ``operator_request``; also the sum of all request
            parameters.
        max_characters_per_token: a text may have this number times ``max_model_len`` characters. A
            longer text is not tokenized.
        max_json_depth: levels of lists and objects.
        max_messages: messages of a conversation.
        max_parts: content parts (texts, pictures, clips) of all messages.
        max_tools: tools of a conversation.
        max_inputs: inputs of an ``embedding_request``, or its pairs to score.
        max_pooled_numbers: numbers in the answer to an ``embedding_request``, for all inputs.
        max_n: completions of a request. Empty: half of the engine argument ``max_num_seqs``, so
            that one request does not take every seat. Of a longer list of prompts to the OpenAI
            port, as many run at a time.
        max_answer_tokens: ``n`` times ``max_tokens``, if ``n`` is more than one.
        max_logprobs: ``logprobs`` and ``prompt_logprobs``, each. The engine argument
            ``max_logprobs`` is vLLM's own limit.
        max_logprob_values: ``max_tokens`` times ``logprobs``, plus the prompt's tokens times
            ``prompt_logprobs``; all of that times ``n``. ``max_tokens`` is first capped at the
            room left after the prompt. The prompts of a request are added up.
        max_token_ids: different ids in a parameter such as ``allowed_token_ids``, times ``n``. The
            prompts of a request are added up.
        max_stream_interval: the largest ``stream_interval`` of a request.
        max_stop_strings: strings of ``stop``, and of ``bad_words``. Each may have 1,024 characters.
        max_constraint_bytes: characters of a JSON schema, regular expression, grammar or structural
            tag, or of all strings of ``choice``.
        max_constraint_depth: levels of parentheses in a regular expression or grammar.
        max_constraint_repeats: characters of a regular expression with its repetitions written out.
            Also each repetition or length in a grammar or schema.
        max_choices: strings of ``choice``, and of all enumerations of a schema.
        max_images: pictures of a request.
        max_image_bytes: the file of a picture (PNG, JPEG or WEBP).
        max_image_pixels: width times height, added up over all pictures of a request.
        max_clips: audios and videos of a request.
        max_clip_bytes: the file of an audio or a video.
        max_clip_seconds: the length of an audio or a video.
        max_video_frames: frames of a video, by its header.
        max_frame_pixels: width times height, added up over all videos of a request, by their
            headers.
        allowed_media_domains: hosts from which vLLM may fetch media of ``messages``, such as
            ``images.example.com``. If empty, nothing is fetched.
        allowed_chat_template_kwargs: names in ``chat_template_kwargs``. The tokenizer's own
            arguments are never allowed.
        allowed_request_fields: fields of ``sampling_parameters`` that a request may have: some of
            ``extra_args``, ``kv_transfer_params``, ``session_id``, ``data_parallel_rank``.
        operator_requests: what an ``operator_request`` may ask for: some of ``sleep``, ``wake_up``,
            ``is_sleeping``, ``reset_prefix_cache``, ``load_lora``.
        max_constraint_seconds: processor time to compile a constraint, in a separate process. A
            constraint that gets slower with each token is refused.
        default_timeout_seconds: the timeout of a request that sets none. 0: no timeout.
        max_queue_seconds: how long a request may wait for its first token. After that it gets
            UNAVAILABLE.
    """

    max_requests_in_flight: int = 1024
    max_request_bytes: int = 64 * MIB
    max_text_bytes: int = 4 * MIB
    max_parameter_bytes: int = MIB
    max_characters_per_token: int = 32
    max_json_depth: int = 64
    max_messages: int = 4096
    max_parts: int = 4096
    max_tools: int = 512
    max_inputs: int = 256
    max_pooled_numbers: int = 1 << 24  # each takes 21 characters of JSON
    max_n: int | None = None
    max_answer_tokens: int = 131_072
    max_logprobs: int = 128
    # A chat without `max_tokens` may fill a model's length, and 131,072 tokens with five log
    # probabilities each are 655,360 values.
    max_logprob_values: int = 1 << 20
    max_token_ids: int = 1 << 20
    max_stream_interval: int = 256
    max_stop_strings: int = 64
    max_constraint_bytes: int = 65_536
    max_constraint_depth: int = 32
    max_constraint_repeats: int = 10_000
    max_choices: int = 1000
    max_images: int = 16
    max_image_bytes: int = 16 * MIB
    max_image_pixels: int = 1 << 25
    max_clips: int = 4
    max_clip_bytes: int = 32 * MIB
    max_clip_seconds: int = 600
    max_video_frames: int = 36_000
    max_frame_pixels: int = 18 * MIB  # two films of 4096 x 2160
    allowed_media_domains: tuple[str, ...] = ()
    allowed_chat_template_kwargs: tuple[str, ...] = TEMPLATE_KWARGS
    allowed_request_fields: tuple[str, ...] = ()
    operator_requests: tuple[str, ...] = ()
    max_constraint_seconds: int = 2
    default_timeout_seconds: int = 0
    # With the default of `max_requests_in_flight`, requests wait for an hour only if the server
    # answers fewer than one in 3.5 s. Ten minutes would end healthy batches: of 1,024 answers of
    # 8,000 tokens, 256 at a time and 20 tokens/s each, the last ones begin after 20 minutes.
    max_queue_seconds: int = 3600


USUAL = Limits()
_COUNT = {"image": "max_images", "audio": "max_clips", "video": "max_clips"}
"""The limit of the number of an input's elements, by the input's name."""
_SIZE = {
    "text_input": "max_text_bytes",
    "prompt_token_ids": "max_text_bytes",
    "embedding_request": "max_text_bytes",
    "sampling_parameters": "max_parameter_bytes",
    "tools": "max_parameter_bytes",
    "tool_choice": "max_parameter_bytes",
    "chat_template_kwargs": "max_parameter_bytes",
    "operator_request": "max_parameter_bytes",
}
"""The limit of an input's bytes, by the input's name."""


def refuse_above(limit: int, found: int, what: str, unit: str = "", remedy: str = "") -> None:
    """Refuse a request that has more than ``limit`` of something; a limit of 0 refuses nothing.

    Args:
        limit: the most that is allowed. 0 means no limit.
        found: how much the request has.
        what: the beginning of the sentence "tools has 9 entries".
        unit: the unit of ``found``.
        remedy: what the client may do instead.

    Raises:
        InvalidRequestError: there is more. The text has the amount and the limit.
    """
    if 0 < limit < found:
        amount = f"{found} {unit}".rstrip()
        end = f": {remedy}" if remedy else ""
        raise InvalidRequestError(f"{what} {amount}; this model takes at most {limit}{end}")


def context_length(tokens: int) -> str:
    """Return how long a prompt may be, as a part of a sentence.

    LiteLLM and other clients look for these words of vLLM's, and then try another model.
    """
    return f"this model's maximum context length is {tokens} tokens"


def check_sizes(
    limits: Limits, inputs: Mapping[str, np.ndarray[Any, Any]], parameters: str
) -> None:
    """Refuse a request whose inputs are too large, before they are decoded.

    Args:
        limits: the model's limits.
        inputs: the tensors by name.
        parameters: the request parameters as JSON text.

    Raises:
        InvalidRequestError: one input is too large, or all together are.
    """
    parameter_bytes = len(parameters.encode())
    total = parameter_bytes
    for name, array in inputs.items():
        size = _bytes(array)
        total += size
        if name in _COUNT:
            most = getattr(limits, _COUNT[name])
            refuse_above(most, array.size, f"{name} has", "elements")
        elif name in _SIZE:
            most = getattr(limits, _SIZE[name])
            refuse_above(most, size, f"{name} has", "bytes")
    refuse_above(
        limits.max_parameter_bytes, parameter_bytes, "the request parameters have", "bytes"
    )
    refuse_above(limits.max_request_bytes, total, "the request has", "bytes")


def _bytes(array: np.ndarray[Any, Any]) -> int:
    """Return how many bytes an input counts for."""
    # The only integers in arrays are token ids. A token id needs 4 bytes. Ids arrive with 64 bits,
    # because Triton would cut those in JSON to 32 bits.
    if array.dtype.kind == "i":
        return 4 * array.size
    if array.dtype.kind != "O":
        return int(array.nbytes)
    # Objects are strings. Nearly all inputs have one element, which is faster without a loop.
    if array.size == 1:
        value = array.item(0)
        return len(value) if isinstance(value, bytes | str) else 0
    strings = (value for value in array.reshape(-1) if isinstance(value, bytes | str))
    return sum(map(len, strings))
