"""Open conversations with the model's parsers, and check the constraints that vLLM makes from their tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import InvalidRequestError, UnsupportedError
from triton_vllm.constraints import checks as constraints

if TYPE_CHECKING:
    from triton_vllm.base.limits import Limits
    from triton_vllm.chat.request import Chat
    from triton_vllm.vllm_api import Conversation, Parsers


def begin(
    parsers: Parsers | None,
    chat: Chat,
    params: Any,
    refusals: tuple[type[Exception], ...],
    limits: Limits,
    *,
    stream: bool,
) -> Conversation | None:
    """Return the conversation that reads the answers to a chat; None if the model has no parsers.

    Args:
        parsers: the model's parsers.
        chat: the parsed chat.
        params: its SamplingParams. The parsers' settings are written into them.
        refusals: vLLM's exceptions for wrong requests.
        limits: the model's limits.
        stream: whether the answer is streamed.

    Raises:
        UnsupportedError: the request has a tool choice, and the model no parser of tool calls.
        InvalidRequestError: vLLM refuses messages, tools or the tool choice.
    """
    if chat.tool_choice not in (None, "none") and (parsers is None or not parsers.names.tool):
        raise UnsupportedError(
            "tool_choice: this model has no tool_parser in its engine arguments; only none can be chosen"
        )
    if parsers is None:
        return None
    given = getattr(params, "structured_outputs", None)
    try:
        conversation = parsers.open(chat.fields(), given, stream=stream)
        constraint = conversation.structured()
    except refusals as error:
        raise InvalidRequestError(f"messages, tools or tool_choice: {_reason(error)}") from None
    if constraint is not given:  # made from the tools, so its size has not been checked
        names = ("json", "regex", "grammar", "structural_tag", "choice")
        try:
            constraints.check(limits, {name: getattr(constraint, name, None) for name in names})
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"tools: of them vLLM makes a constraint for the answer, and {error}"
            ) from None
        params.structured_outputs = constraint
    for name, value in conversation.decoding().items():
        setattr(params, name, value)
    conversation.follow(params)
    return conversation


def _reason(error: Exception) -> str:
    """Return vLLM's first complaint, with its place in the request."""
    errors = getattr(error, "errors", None)
    if callable(errors) and (found := errors()):
        place = ".".join(str(part) for part in found[0]["loc"][:4])
        return f"{place}: {found[0]['msg']}" if place else str(found[0]["msg"])
    return str(error).partition("\n")[0]
