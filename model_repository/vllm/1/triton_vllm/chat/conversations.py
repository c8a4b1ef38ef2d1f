"""Open conversations with the model's parsers, and check the constraints made from their tools."""

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
        params: the request's SamplingParams. The parsers' settings are written into them.
        refusals: vLLM's exceptions for wrong requests.
        limits: the model's limits.
        stream: whether the answer is streamed.

    Raises:
        UnsupportedError: the request has a tool choice, but the model has no parser of tool calls.
        InvalidRequestError: vLLM refuses messages, tools or the tool choice.
    """
    reads_tool_calls = parsers is not None and bool(parsers.names.tool)
    if chat.tool_choice not in (None, "none") and not reads_tool_calls:
        raise UnsupportedError(
            "tool_choice: this model has no tool_parser in its engine arguments; "
            "only none can be chosen"
        )
    if parsers is None:
        return None
    own_constraint = getattr(params, "structured_outputs", None)
    try:
        conversation = parsers.open(chat.fields(), own_constraint, stream=stream)
        constraint = conversation.structured()
    except refusals as error:
        raise InvalidRequestError(f"messages, tools or tool_choice: {_reason(error)}") from None
    # The request's own constraint has been checked before. One that is made from the tools has not.
    if constraint is not own_constraint:
        names = ("json", "regex", "grammar", "structural_tag", "choice")
        try:
            constraints.check(limits, {name: getattr(constraint, name, None) for name in names})
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"tools: of them vLLM makes a constraint for the answer, and {error}"
            ) from None
        params.structured_outputs = constraint
    # Parsers may need special tokens in the text.
    for name, value in conversation.decoding().items():
        setattr(params, name, value)
    # The conversation reads the parameters, so they are complete before.
    conversation.follow(params)
    return conversation


def _reason(error: Exception) -> str:
    """Return vLLM's first complaint, with its place in the request."""
    # pydantic's exception has a method `errors`. It lists every field that it tried.
    errors = getattr(error, "errors", None)
    complaints = errors() if callable(errors) else ()
    if not complaints:
        return str(error).partition("\n")[0]
    place = ".".join(map(str, complaints[0]["loc"][:4]))
    message = str(complaints[0]["msg"])
    return f"{place}: {message}" if place else message
