"""Parse the input tensors of one request into frozen dataclasses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from triton_vllm.base import official
from triton_vllm.base.coerce import to_bool, to_int
from triton_vllm.base.dialect import OURS
from triton_vllm.base.document import json_object
from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import USUAL, check_sizes, refuse_above
from triton_vllm.base.wants import Wants
from triton_vllm.chat import request as chat
from triton_vllm.chat.request import Chat
from triton_vllm.engine.order import Prompt
from triton_vllm.media.checks import check_item
from triton_vllm.operator import request as operator
from triton_vllm.request import embedding, engine_fields
from triton_vllm.request.contract import BOOL, EXTRA_FLAGS, FLAGS, INPUTS, INT64, MEDIA
from triton_vllm.request.embedding import EmbedRequest
from triton_vllm.request.generate import GenerateRequest
from triton_vllm.request.kinds import Operation

if TYPE_CHECKING:
    from triton_vllm.base.dialect import Dialect
    from triton_vllm.base.limits import Limits
    from triton_vllm.base.protocols import Inputs
    from triton_vllm.request.kinds import Request

PROMPTS = ("text_input", "messages", "prompt_token_ids")
PARALLEL = "parallel_tool_calls"
# To add such a tensor, add a row to ``INPUTS`` and an attribute to ``GenerateRequest``.
PLAIN = {
    kind: tuple(
        tensor.name
        for tensor in INPUTS
        if tensor.data_type == kind and tensor.name in GenerateRequest.__annotations__
    )
    for kind in (BOOL, INT64)
}
"""The tensors that become attributes of a ``GenerateRequest`` unchanged, by type."""
# Triton's frontends and request parameters reserve these names. They reach the parameters only by
# header forwarding.
RESERVED = ("sequence_id", "sequence_start", "sequence_end", "headers", "traceparent", "tracestate")
# Triton 24.10 passes this field of the generate endpoint on as a request parameter.
REQUEST_ID = "id"
"""The client's name for its request."""

# Triton's OpenAI frontends of 2024 and 2025 send `best_of` with each completion and `logprobs` with
# each chat. vLLM no longer has `best_of`, and its `logprobs` is a number.
MEANINGLESS = {"best_of": 1, "logprobs": False}
"""Parameters that ask for nothing if they have this value."""


def parse(
    inputs: Inputs,
    parameters: str,
    timeout: int = 0,
    limits: Limits = USUAL,
    dialect: Dialect = OURS,
) -> Request:
    """Parse one request.

    Args:
        inputs: the tensors by name. Strings are object arrays of bytes.
        parameters: the request parameters as JSON text. ``sampling_parameters`` replaces them.
        timeout: Triton's own timeout of the request in microseconds. Used if the request sets no
            other; 0 means none.
        limits: a request that exceeds them is refused.
        dialect: determines whether an empty text and unknown fields are accepted.

    Raises:
        InvalidRequestError: the text has the name of the input, the reason and the expected value.
        UnsupportedError: the operator has not allowed a field or an operation.
    """
    check_sizes(limits, inputs, parameters)
    if operator.INPUT_NAME in inputs:
        return _parse_operator(inputs, timeout, limits)
    if embedding.INPUT_NAME in inputs:
        return _parse_embedding(inputs, timeout, limits, dialect)
    values = _parameters(inputs, parameters, limits)
    # From here on, each function that gets ``values`` removes its fields. What is left in the end
    # are the sampling parameters.
    attributes = _plain_attributes(inputs, values)
    attributes["timeout"] = attributes["timeout"] or timeout
    prompts = [name for name in PROMPTS if name in inputs]
    if len(prompts) != 1:
        found = " and ".join(prompts) or "none"
        raise InvalidRequestError(f"exactly one of {', '.join(PROMPTS)} is required, found {found}")
    media = _media(inputs, limits)
    text = None
    token_ids = None
    conversation = None
    if "text_input" in inputs:
        text = _text(inputs, takes_empty=dialect.takes_empty_text)
    elif "prompt_token_ids" in inputs:
        token_ids = _token_ids(inputs)
    else:
        conversation = _chat(inputs, limits)
    prompt = Prompt(
        media=media,
        text=text,
        token_ids=token_ids,
        chat=conversation,
        cache_salt=engine_fields.take_cache_salt(values),
    )
    return GenerateRequest(
        prompt=prompt,
        echo=_echo(inputs, stream=attributes["stream"]),
        wants=_wants(inputs),
        lora_name=_lora_name(values),
        engine_fields=engine_fields.take(
            values, limits.allowed_request_fields, limits.max_json_depth
        ),
        parameters=values,
        **attributes,
    )


def strings(inputs: Inputs, name: str) -> tuple[str, ...]:
    """Return all elements of a string tensor of any shape.

    Raises:
        InvalidRequestError: an element is not UTF-8.
    """
    try:
        return tuple(map(_decoded, inputs[name].reshape(-1)))
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{name} must be UTF-8 text") from None


def _decoded(value: Any) -> str:
    # Triton's strings are bytes.
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _scalar(inputs: Inputs, name: str) -> Any:
    values = inputs[name]
    if values.size != 1:
        raise InvalidRequestError(f"{name} must have one element, not {values.size}")
    value = values.item(0)
    return strings(inputs, name)[0] if isinstance(value, bytes) else value


def _flag(inputs: Inputs, name: str) -> bool:
    if name not in inputs:
        return False
    try:
        return to_bool(_scalar(inputs, name))
    except ValueError as error:
        raise InvalidRequestError(f"{name} {error}") from None


def _plain_attributes(inputs: Inputs, values: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that are numbers or flags, by the names of their tensors (``PLAIN``).

    A missing one is 0 or False. Numbers may also be among the sampling parameters (``values``),
    from which they are removed.
    """
    numbers = {name: _integer(inputs, values, name) for name in PLAIN[INT64]}
    return numbers | {name: _flag(inputs, name) for name in PLAIN[BOOL]}


def _text(inputs: Inputs, *, takes_empty: bool) -> str:
    text = str(_scalar(inputs, "text_input"))
    if not text and not takes_empty:
        raise InvalidRequestError("text_input is empty: give a prompt of at least one character")
    return text


def _token_ids(inputs: Inputs) -> tuple[int, ...]:
    values = inputs["prompt_token_ids"].reshape(-1)
    if values.size == 0 or int(values.min()) < 0:
        raise InvalidRequestError(
            "prompt_token_ids must be a non-empty list of non-negative token ids"
        )
    return tuple(values.tolist())


def _chat(inputs: Inputs, limits: Limits) -> Chat:
    """Return the conversation; all its inputs but one are JSON texts."""
    texts = {name: str(_scalar(inputs, name)) for name in chat.CHAT_INPUTS if name in inputs}
    texts["messages"] = chat.joined(strings(inputs, "messages"))
    parsed = chat.parse(limits, texts)
    # If the client says nothing, vLLM's default holds, not False.
    if PARALLEL in inputs:
        return replace(parsed, parallel_tool_calls=_flag(inputs, PARALLEL))
    return parsed


def _media(inputs: Inputs, limits: Limits) -> dict[str, tuple[str, ...]]:
    """Return the pictures, audios and videos in base64, by the names of their tensors.

    Raises:
        InvalidRequestError: one is malformed or too large, or the request is a chat.
    """
    media = {}
    pixels = 0
    for name in MEDIA:
        # An empty tensor counts as missing.
        items = strings(inputs, name) if name in inputs else ()
        if not items:
            continue
        if "messages" in inputs:
            raise InvalidRequestError(f"{name}: with messages, media go into their content")
        for index, text in enumerate(items):
            pixels += check_item(limits, name, f"{name}[{index}]", text)
        media[name] = items
    # All pictures together: each of them is decoded in memory.
    refuse_above(limits.max_image_pixels, pixels, "the pictures have", "pixels")
    return media


def _echo(inputs: Inputs, *, stream: bool) -> bool:
    """Return whether the prompt precedes the answer."""
    # As in the official backend: in a whole answer unless excluded, in a stream never.
    if "exclude_input_in_output" not in inputs:
        return not stream and "text_input" in inputs
    echo = not _flag(inputs, "exclude_input_in_output")
    if echo and stream:
        raise InvalidRequestError(
            f"{official.FAILED_PREFIX}When streaming, "
            "`exclude_input_in_output` = False is not allowed."
        )
    return echo


def _wants(inputs: Inputs) -> Wants:
    flags = [name for name in (*FLAGS, *EXTRA_FLAGS) if _flag(inputs, name)]
    return Wants(**{name.removeprefix("return_"): True for name in flags})


def _parameters(inputs: Inputs, parameters: str, limits: Limits) -> dict[str, Any]:
    """Return the request's fields: those of the tensor, or else of the request parameters.

    Args:
        inputs: the tensors by name.
        parameters: the request parameters as JSON text.
        limits: the most levels of JSON.

    Raises:
        InvalidRequestError: the text is not a JSON object.
    """
    has_tensor = "sampling_parameters" in inputs
    name = "the request parameters"
    text = parameters
    if has_tensor:
        name = "sampling_parameters"
        text = str(_scalar(inputs, name))
    values = json_object(text, name, limits.max_json_depth) if text else {}
    if not has_tensor:
        values.pop(REQUEST_ID, None)
        # A forwarded HTTP header arrives as a parameter, too. None of vLLM's names has a dash or a
        # capital.
        values = {k: v for k, v in values.items() if k.isidentifier() and k == k.lower()}
    return {key: value for key, value in values.items() if not _is_meaningless(key, value)}


def _is_meaningless(key: str, value: Any) -> bool:
    """Return whether a parameter says nothing about sampling."""
    if value is None or key in RESERVED or key.startswith("triton_"):
        return True
    # None for all other parameters, and no value is None here.
    meaningless = MEANINGLESS.get(key)
    # The types, because False equals 0 in Python, and ``logprobs`` 0 asks for something.
    return type(value) is type(meaningless) and value == meaningless


def _lora_name(values: dict[str, Any]) -> str | None:
    name = values.pop("lora_name", None)
    if name is not None and not isinstance(name, str):
        raise InvalidRequestError("lora_name must be a string")
    return name


def _integer(inputs: Inputs, values: dict[str, Any], name: str) -> int:
    """Return an integer from its tensor, or else from ``values``, or else 0.

    It is removed from ``values`` in any case.
    """
    value = values.pop(name, 0)
    if name in inputs:
        value = _scalar(inputs, name)
    try:
        number = to_int(value)
    except ValueError as error:
        raise InvalidRequestError(f"{name} {error}") from None
    if name == "timeout" and number < 0:
        raise InvalidRequestError("timeout must not be negative: it is in microseconds, 0 for none")
    return number


def _parse_operator(inputs: Inputs, timeout: int, limits: Limits) -> Operation:
    """Return an operator's request; ``timeout`` in microseconds holds if the request has none."""
    for name in (*PROMPTS, embedding.INPUT_NAME):
        if name in inputs:
            raise InvalidRequestError(f"{operator.INPUT_NAME} cannot be combined with {name}")
    text = str(_scalar(inputs, operator.INPUT_NAME))
    timeout = _integer(inputs, {}, "timeout") or timeout
    depth = limits.max_json_depth
    return Operation(operator.parse(text, depth, limits.operator_requests, timeout))


def _parse_embedding(
    inputs: Inputs, timeout: int, limits: Limits, dialect: Dialect
) -> EmbedRequest:
    """Return a request to embed, pool or score; see ``parse`` for the arguments."""
    text = str(_scalar(inputs, embedding.INPUT_NAME))
    values = json_object(text, embedding.INPUT_NAME, limits.max_json_depth)
    pooling = values.get("pooling_params") or {}
    if not isinstance(pooling, dict):
        raise InvalidRequestError("embedding_request.pooling_params must be an object")
    task = pooling.pop("task", "embed")
    chosen = {}
    for name, value in pooling.items():
        # The OpenAI frontend sends each value as a list with one element.
        element = value[0] if isinstance(value, list) and len(value) == 1 else value
        if element is not None:
            chosen[name] = element
    return EmbedRequest(
        prompts=embedding.prompts(
            limits, values, takes_unknown_fields=dialect.takes_unknown_fields
        ),
        scoring=embedding.scoring(limits, values),
        wants=_wants(inputs),
        task=str(task),
        parameters=chosen,
        lora_name=_lora_name(values),
        priority=_integer(inputs, {}, "priority"),
        timeout=_integer(inputs, {}, "timeout") or timeout,
    )
