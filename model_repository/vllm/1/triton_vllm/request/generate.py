"""A request to complete a prompt: what it has, how it is checked, and how it is answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.errors import UnsupportedError
from triton_vllm.chat import conversations
from triton_vllm.chat.parsed import AnswerReader
from triton_vllm.constraints import checks as constraints
from triton_vllm.engine.order import Order
from triton_vllm.reply.response import Assembler, ChatAssembler
from triton_vllm.request import sampling
from triton_vllm.request.kinds import Call, Request

if TYPE_CHECKING:
    from triton_vllm.base.wants import Wants
    from triton_vllm.engine.order import Prompt
    from triton_vllm.request.kinds import Served
    from triton_vllm.vllm_api import Conversation


@dataclass(frozen=True)
class GenerateRequest(Request):
    """One prompt to complete.

    Attributes:
        prompt: the prompt.
        stream: whether the client wants new tokens as soon as they exist.
        echo: whether the prompt precedes the answer.
        wants: the optional outputs that the client asked for.
        parameters: the sampling parameters, as JSON has them.
        lora_name: the name of a LoRA adapter. None for the base model.
        priority: as vLLM's scheduler has it. A lower number goes first.
        timeout: microseconds, as everywhere in Triton. With 0 there is no timeout.
        engine_fields: the fields that are in ``ENGINE_FIELDS``.
    """

    prompt: Prompt
    stream: bool
    echo: bool
    wants: Wants
    parameters: Mapping[str, Any]
    lora_name: str | None = None
    priority: int = 0
    timeout: int = 0
    engine_fields: Mapping[str, Any] = field(default_factory=dict)

    def call(self, served: Served, options: Mapping[str, Any]) -> Call:
        """See ``Request``."""
        # 1) Check the prompt, then make vLLM's parameters.
        served.require_adapter(self.lora_name)
        served.fit.check_prompt(self.prompt)
        served.require_task("generate")
        params = self._params(served)
        served.fit.check_params(params)
        served.fit.check_weight(params.n, "sampling parameters: n asks for", "completions")
        # 2) Open the conversation. It may set a constraint for its tools, and has the tools as the
        #    chat template takes them.
        prompt = self.prompt
        conversation = self._conversation(served, params)
        if conversation is not None and prompt.chat is not None:
            prompt = replace(prompt, chat=replace(prompt.chat, tools=conversation.tools()))
        constraint = constraints.to_compile(
            served.fit.limits, getattr(params, served.schema.structured_name, None)
        )
        if constraint is not None:
            prompt = replace(prompt, constraint=constraint)
        # 3) Put all of it together.
        add_options = self._set_engine_fields(served, params)
        order = Order(
            prompts=(prompt,),
            params=params,
            completions=params.n,
            streams=self.stream,
            lora_name=self.lora_name,
            priority=self.priority,
            timeout=self.timeout,
            options={**add_options, **options},
            conversation=conversation,
        )
        return Call(order, self._assembler(order))

    def _assembler(self, order: Order) -> Assembler:
        """Return what makes the responses: by parsers for a chat on a model that has them."""
        n = order.completions
        has_logprobs = not self._wants_only_sum()
        if order.conversation is not None:
            reader = AnswerReader(order.conversation, n)
            return ChatAssembler(self.wants, n, reader, has_logprobs=has_logprobs)
        # Token ids and conversations have no text to echo.
        prefix = self.prompt.text if self.echo else None
        return Assembler(self.wants, n, prefix or "", has_logprobs=has_logprobs)

    def _wants_only_sum(self) -> bool:
        """Return whether the client wants the sum of log probabilities, and not them."""
        return self.wants.cumulative_logprob and "logprobs" not in self.parameters

    def _params(self, served: Served) -> Any:
        """Return vLLM's SamplingParams.

        Raises:
            InvalidRequestError: a parameter is wrong.
        """
        values = self.parameters
        # Without logprobs vLLM sums up nothing, and the answer is NaN.
        if self._wants_only_sum():
            values = {"logprobs": 0, **values}
        return sampling.build(
            served.schema,
            values,
            stream=self.stream,
            limits=served.fit.limits,
            chat=None if self.prompt.chat is None else served.fit.facts.chat,
        )

    def _conversation(self, served: Served, params: Any) -> Conversation | None:
        """Return what parses the answers to a chat; None if it is not a chat, or without parsers.

        The parsers' settings are written into ``params``.
        """
        chat = self.prompt.chat
        if chat is None:
            return None
        # What vLLM raises for a request that is wrong.
        refusals = (*served.vllm.client_errors, KeyError)
        return conversations.begin(
            served.parsers, chat, params, refusals, served.fit.limits, stream=self.stream
        )

    def _set_engine_fields(self, served: Served, params: Any) -> dict[str, Any]:
        """Set the fields that belong into SamplingParams; return the others for ``add_request``."""
        fields = self.engine_fields
        extra = {**fields.get("extra_args", {})}
        if "kv_transfer_params" in fields:
            extra["kv_transfer_params"] = fields["kv_transfer_params"]
        if extra:
            params.extra_args = extra
        options = {}
        for name in ("session_id", "data_parallel_rank"):
            if name not in fields:
                continue
            if name not in vllm_api.request_keywords(served.vllm):
                raise UnsupportedError(f"sampling parameter '{name}': this vLLM does not have it")
            options[name] = fields[name]
        return options
