"""Use vLLM's own parsers of chat answers as its OpenAI server does.

They split an answer into reasoning, tool calls and content.
"""

from __future__ import annotations

import importlib
import inspect
import uuid
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from triton_vllm.base.coerce import closest
from triton_vllm.vllm_api.aligning import Aligner, Fragment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from triton_vllm.base.protocols import CompletionOutput, EngineClient

_REQUEST_MODULE = "vllm.entrypoints.openai.chat_completion.protocol"
_MANAGERS = {
    "tool_parser": ("vllm.tool_parsers", "ToolParserManager"),
    "reasoning_parser": ("vllm.reasoning", "ReasoningParserManager"),
}


class ParserError(Exception):
    """The parsers are not available, or do not take a request; the text says why."""


@dataclass(frozen=True)
class ParserNames:
    """The parsers that the operator has chosen.

    Attributes:
        tool: vLLM's name of the parser of tool calls. May be empty.
        reasoning: vLLM's name of the parser of reasoning. May be empty.
        plugin: a file of the operator's that adds reasoning parsers. May be empty.
    """

    tool: str = ""
    reasoning: str = ""
    plugin: str = ""

    def __bool__(self) -> bool:
        return bool(self.tool or self.reasoning)


def has_parsers() -> bool:
    """Return whether this vLLM's parsers read whole and streamed answers on their own."""
    # They do since 0.26. vLLM 0.24 has the classes but not all of these methods. Each chat would
    # fail there.
    try:
        request = importlib.import_module(_REQUEST_MODULE).ChatCompletionRequest
        parser = importlib.import_module("vllm.parser.abstract_parser").Parser
    except (ImportError, AttributeError):
        return False
    return (
        hasattr(parser, "parse")
        and hasattr(parser, "parse_delta")
        and hasattr(request, "extract_structured_outputs")
    )


def check_parsers(names: ParserNames) -> None:
    """Check that the installed vLLM has the parsers.

    Raises:
        ParserError: a parser is missing. The text has the names that exist.
    """
    if not names:
        return
    if not has_parsers():
        raise ParserError(
            "tool_parser needs a vLLM whose vllm.parser reads whole answers and streams "
            "(0.26 or later)"
        )
    for argument, name in (("tool_parser", names.tool), ("reasoning_parser", names.reasoning)):
        module, manager_name = _MANAGERS[argument]
        manager = getattr(importlib.import_module(module), manager_name)
        # The operator's file may add the very parser that is asked for.
        if argument == "reasoning_parser" and names.plugin:
            manager.import_reasoning_parser(names.plugin)
        known = manager.list_registered()
        if name and name not in known:
            hint = closest(name, known)
            raise ParserError(
                f"{argument}: vLLM has no parser '{name}'{hint}; it has {', '.join(known)}"
            )


@dataclass(frozen=True)
class Piece:
    """The new content of one completion.

    Attributes:
        content: the text that is neither reasoning nor a tool call.
        reasoning: the text of the reasoning.
        tool_calls: as in the OpenAI protocol. Those of a stream have an index, and only the new
            part of the arguments.
        finish_reason: None until the completion has ended.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class Parsers:
    """The parsers of a model.

    Args:
        llm: the running engine.
        names: the chosen parsers.

    Raises:
        ParserError: the parsers do not fit the model, e.g. because its tokenizer lacks a token.
    """

    def __init__(self, llm: EngineClient, names: ParserNames) -> None:
        self.names = names
        self._config = llm.model_config
        self._tokenizer = llm.get_tokenizer()
        self._request_class = importlib.import_module(_REQUEST_MODULE).ChatCompletionRequest
        get_parser = importlib.import_module("vllm.parser").ParserManager.get_parser
        options = {
            "tool_parser_name": names.tool or None,
            "reasoning_parser_name": names.reasoning or None,
            "enable_auto_tools": bool(names.tool),
            "model_name": self._config.model,
            "is_harmony": self._config.hf_config.model_type == "gpt_oss",
            "tokenizer": self._tokenizer,
        }
        # Not every version takes all of them.
        known = inspect.signature(get_parser).parameters
        options = {name: value for name, value in options.items() if name in known}
        try:
            self._parser_class = get_parser(**options)
            # A parser looks for its tokens when it is made. A tokenizer that lacks them fails the
            # load here, instead of each chat.
            self._parser_class(self._tokenizer, None, model_config=self._config)
        except Exception as error:
            raise ParserError(f"the parsers do not fit the model: {str(error).strip()}") from error

    def open(self, chat: Mapping[str, Any], structured: Any, *, stream: bool) -> Conversation:
        """Return the reader of the answers to a conversation.

        Args:
            chat: messages, tools, tool_choice, parallel_tool_calls and chat_template_kwargs of the
                OpenAI protocol.
            structured: the request's own constraint: vLLM's StructuredOutputsParams or None.
            stream: whether the answer is streamed.

        Raises:
            Exception: vLLM refuses the request, with pydantic's exception or its own.
        """
        # 1) vLLM's request has fields of its own for these two arguments of the template.
        kwargs = dict(chat["chat_template_kwargs"])
        fields: dict[str, Any] = {
            name: bool(kwargs.pop(name))
            for name in ("add_generation_prompt", "continue_final_message")
            if name in kwargs
        }
        if fields.get("continue_final_message"):
            fields["add_generation_prompt"] = False
        # 2) Decide what becomes of the request's own constraint if it has tools, too.
        tools = chat["tools"]
        choice = chat["tool_choice"]
        may_call = bool(tools) and choice in (None, "auto")
        must_call = bool(tools) and choice not in (None, "auto", "none")
        # If the model may call a tool, vLLM's request does not get the constraint. vLLM would
        # compile it right here, at any cost, to see whether it can be joined with the tools. So the
        # constraint holds alone, as it does when vLLM cannot join them.
        alone = structured if may_call else None
        # If the model must call a tool, nothing gets the constraint. vLLM ignores a
        # `response_format` then, too. Some of its parsers would refuse the constraint, or take it
        # for the answer's.
        in_request = None if may_call or must_call else structured
        # 3) Make vLLM's request. A field that is not set gets vLLM's default.
        optional = {
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": chat["parallel_tool_calls"],
            "chat_template_kwargs": kwargs or None,
            "structured_outputs": in_request,
        }
        fields |= {name: value for name, value in optional.items() if value is not None}
        request = self._request_class(messages=chat["messages"], stream=stream, **fields)
        template_kwargs = request.build_chat_params(None, "auto").chat_template_kwargs

        def make() -> Any:
            return self._parser_class(
                self._tokenizer,
                request.tools,
                chat_template_kwargs=template_kwargs,
                model_config=self._config,
            )

        # 4) Let the parser change the request, as vLLM's server does.
        parser = make()
        always = getattr(self._parser_class, "always_adjust_request", False)
        reasons = self._parser_class.reasoning_parser_cls is not None
        if always or reasons or request.tool_choice != "none":
            request = parser.adjust_request(request)
        return Conversation(
            request, make, template_kwargs, auto_tools=bool(self.names.tool), alone=alone
        )


class Conversation:
    """A conversation as vLLM's server sees it.

    Args:
        request: vLLM's ChatCompletionRequest, as its parsers have adjusted it.
        make: returns a new parser.
        template_kwargs: arguments of the chat template and the parsers.
        auto_tools: whether the model has a parser of tool calls.
        alone: the request's own constraint, if it holds while tools may be called. Otherwise None.
    """

    def __init__(
        self,
        request: Any,
        make: Callable[[], Any],
        template_kwargs: Mapping[str, Any],
        *,
        auto_tools: bool,
        alone: Any = None,
    ) -> None:
        self._alone = alone
        self.request = request
        self.make = make
        self.auto_tools = auto_tools
        self._template_kwargs = template_kwargs
        # `follow` sets these two.
        self.held_characters = 0
        self.skips_special_tokens = True

    def tools(self) -> tuple[Mapping[str, Any], ...] | None:
        """Return the tools as the chat template takes them, or None."""
        tools = self.request.tools
        return tuple(tool.model_dump() for tool in tools) if tools else None

    def structured(self) -> Any:
        """Return the constraint of the answer: the request's own, or one made from the tools."""
        return self._alone or self.request.extract_structured_outputs()

    def decoding(self) -> dict[str, bool]:
        """Return the sampling parameters about special tokens that the parsers have turned off."""
        values = {
            "skip_special_tokens": self.request.skip_special_tokens,
            "spaces_between_special_tokens": self.request.spaces_between_special_tokens,
        }
        # None is the default of vLLM 0.33, and means on.
        return {name: False for name, value in values.items() if value is False}

    def follow(self, params: Any) -> None:
        """Read from the request's SamplingParams how vLLM will decode the answer."""
        # How much text of a stream vLLM holds back because of stop strings.
        self.held_characters = getattr(params, "output_text_buffer_length", 0)
        self.skips_special_tokens = getattr(params, "skip_special_tokens", True)

    def engine_options(self, prompt: Any) -> dict[str, Any]:
        """Return the keywords of ``add_request`` that say where a constraint begins to hold.

        There are none if the model has no parser of reasoning.
        """
        parser = self.make()
        # A constraint holds as soon as the reasoning has ended. A parser sets this field if its
        # grammar describes the reasoning, too (Mistral's does). Such a grammar holds at once.
        if getattr(self.request, "_grammar_from_parser", False):
            return {"reasoning_ended": True}
        if parser.reasoning_parser is None:
            return {}
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        return {
            "reasoning_ended": parser.is_reasoning_end(list(ids or ())),
            "reasoning_parser_kwargs": {"chat_template_kwargs": dict(self._template_kwargs)},
        }

    def reader(self) -> Reader:
        """Return a reader of one completion."""
        return _StreamReader(self) if self.request.stream else Reader(self)


class Reader:
    """Reads one completion that comes as a whole.

    Attributes:
        aligner: turns vLLM's outputs into the parts to read. None if they are read as they are.
    """

    def __init__(self, conversation: Conversation) -> None:
        self.aligner: Aligner | None = None
        self._request = conversation.request
        self._auto_tools = conversation.auto_tools
        self._parser = conversation.make()
        self._first_call_only = conversation.request.parallel_tool_calls is False

    def read(self, output: CompletionOutput | Fragment, prompt: Sequence[int] | None) -> Piece:
        """Return the content of one output of vLLM.

        Args:
            output: one of vLLM's outputs, or a fragment of it.
            prompt: the prompt's token ids.

        Raises:
            Exception: the parser's own exception about the model's text.
        """
        if prompt is not None and hasattr(self._parser, "set_prompt_token_ids"):
            self._parser.set_prompt_token_ids(prompt)
        reasoning, content, calls = self._parser.parse(
            output.text,
            self._request,
            enable_auto_tools=self._auto_tools,
            model_output_token_ids=output.token_ids,
        )
        # As vLLM's server does: what looks like a call counts only if the request allows calls. A
        # call changes the finish reason, unless the request names the function to call.
        choice = self._request.tool_choice
        may_call = choice == "auto" and self._request.tools and self._auto_tools
        must_call = choice == "required" or _is_named(choice)
        if not may_call and not must_call:
            calls = None
        reason = output.finish_reason
        if (choice == "auto" and calls) or (choice == "required" and reason == "stop"):
            reason = "tool_calls"
        tool_calls = [_tool_call(call) for call in calls or ()]
        return Piece(
            content=content or "",
            reasoning=reasoning or "",
            tool_calls=tool_calls[:1] if self._first_call_only else tool_calls,
            finish_reason=reason,
        )


class _StreamReader(Reader):
    """Reads one completion piece by piece."""

    def __init__(self, conversation: Conversation) -> None:
        super().__init__(conversation)
        self._begun = False  # whether the parser has got anything
        self._called = False  # whether the model has called a tool
        # With stop strings, vLLM holds back text, but not its tokens. Without them, each token
        # comes with its text.
        if conversation.held_characters:
            decode = partial(
                self._parser.model_tokenizer.decode,
                skip_special_tokens=conversation.skips_special_tokens,
            )
            self.aligner = Aligner(conversation.held_characters, decode)

    def read(self, output: CompletionOutput | Fragment, prompt: Sequence[int] | None) -> Piece:
        """Return what this output adds to the completion. Otherwise, see ``Reader.read``."""
        reason = output.finish_reason
        # The completion ended before its first token, so there is nothing to parse.
        if not output.text and not output.token_ids and not self._begun:
            return Piece(finish_reason=reason)
        self._begun = True
        delta = self._parser.parse_delta(
            delta_text=output.text,
            delta_token_ids=list(output.token_ids),
            request=self._request,
            prompt_token_ids=prompt,
            finished=reason is not None,
        )
        piece = Piece()
        # None: the parser needs more of the text.
        if delta is not None:
            self._called |= bool(delta.tool_calls)
            calls = delta.tool_calls or ()
            # With `parallel_tool_calls` false, we return the first call only.
            if self._first_call_only:
                calls = [call for call in calls if call.index == 0]
            tool_calls = [call.model_dump(exclude_unset=True, exclude_none=True) for call in calls]
            piece = Piece(delta.content or "", delta.reasoning or "", tool_calls)
        if self._called and reason == "stop" and not _is_named(self._request.tool_choice):
            reason = "tool_calls"
        return replace(piece, finish_reason=reason)


def _is_named(choice: Any) -> bool:
    # An object names a function. A string is one of "none", "auto" and "required".
    return choice is not None and not isinstance(choice, str)


def _tool_call(call: Any) -> dict[str, Any]:
    """Return a parser's tool call as the OpenAI protocol has it."""
    # The ids have the form of those that vLLM's server makes.
    identity = getattr(call, "id", None) or f"chatcmpl-tool-{uuid.uuid4().hex}"
    return {
        "id": identity,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
