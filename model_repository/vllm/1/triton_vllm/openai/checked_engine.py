"""The engine as vLLM's application sees it: each request passes the gate before vLLM gets it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.errors import (
    AdapterError,
    InternalError,
    InvalidRequestError,
)
from triton_vllm.base.limits import refuse_above
from triton_vllm.constraints import checks as constraints
from triton_vllm.engine import cost
from triton_vllm.engine.job import Subrequest
from triton_vllm.openai.contents import ASKED, UNIT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from triton_vllm.base.protocols import Collector, EngineClient
    from triton_vllm.base.refusals import Refusals
    from triton_vllm.engine.fit import Fit
    from triton_vllm.engine.job import Job
    from triton_vllm.engine.jobs import Jobs
    from triton_vllm.engine.prompts import Prompter
    from triton_vllm.lora.config import Adapters
    from triton_vllm.lora.store import AdapterStore, Version
    from triton_vllm.openai.delivery import Collected
    from triton_vllm.operator.run import Operator
    from triton_vllm.vllm_api import Vllm

# Tasks that the application starts for a request inherit it.
JOB: ContextVar[Job[Collected] | None] = ContextVar("job", default=None)
"""The job of the request that this task works on."""
# vLLM makes a whole answer in one piece in the event loop, and all other requests wait. In a chat
# each log probability takes 16 us: 6 s for 384,000. For one completion there is no such limit: it
# cannot be asked for in smaller parts.
IN_ONE_PIECE = 1 << 16
"""The most log probabilities of an answer with several completions that is not streamed."""


@dataclass(frozen=True)
class Rules:
    """What a request must pass.

    Attributes:
        vllm: the loaded vLLM.
        fit: the checks in front of the engine.
        jobs: begins, counts and ends the requests.
        operator: knows whether the engine sleeps.
        store: the LoRA adapters. None if there are no adapters.
        prompter: tries constraints, and shares the event loop.
        adapters: the places of the LoRA adapters.
        refusals: counts the errors that clients get.
    """

    vllm: Vllm
    fit: Fit
    jobs: Jobs
    operator: Operator
    store: AdapterStore | None
    prompter: Prompter
    adapters: Adapters
    refusals: Refusals

    async def adapter(self, llm: EngineClient, name: Any) -> Version | None:
        """Return the current version of the adapter that a request names as its model.

        Return None if there is no adapter of this name.

        Raises:
            UnavailableError: the adapter cannot be loaded, or the engine sleeps: vLLM would write
                weights into memory that it has given up.
        """
        if self.store is None or not isinstance(name, str):
            return None
        self.operator.require_open()
        try:
            self.adapters.find(name)
            return await self.store.acquire(llm, name)
        # It may be the model's own name. vLLM has an answer for the others.
        except InvalidRequestError:
            return None

    def check(self, prompt: Any, params: Any) -> None:
        """Refuse one of vLLM's own requests for the current job, or count it.

        Args:
            prompt: as ``generate`` and ``encode`` take it.
            params: vLLM's SamplingParams or PoolingParams. May be changed.

        Raises:
            AdapterError: the reason for a refusal.
        """
        job = _job()
        # 1) The state may have changed since the request came through the middleware.
        self.jobs.engine()
        self.operator.require_open()
        # 2) What the parameters ask for
        fit = self.fit
        limits = fit.limits
        fit.check_params(params)
        count = getattr(params, "n", None) or 1
        asked = job.asked + count
        fit.check_weight(asked, ASKED, UNIT, counted=job.weight)
        # 3) The cost of the whole
        cost.bound(job, params, prompt, limits, fit.facts)
        is_whole = getattr(params, "output_kind", None) is self.vllm.RequestOutputKind.FINAL_ONLY
        if asked > 1 and is_whole and limits.max_logprob_values:
            refuse_above(
                IN_ONE_PIECE,
                job.logprob_values,
                "max_tokens times logprobs of all completions are, without stream,",
                "values",
                "set stream, or send a request for each completion",
            )
        self.jobs.ledger.weigh(job, count)

    async def wait_for_seats(self, params: Any) -> None:
        """Let a list of prompts take no more than a request's share of the engine's seats.

        Batch clients send long lists, and vLLM queues them, so no list is refused for this.

        Raises:
            AdapterError: the request has been ended.
        """
        job = _job()
        share = self.fit.share()
        n = getattr(params, "n", None)
        # Inputs for pooling have no ``n``; they give their seats back after one step.
        if not n:
            return
        # The application asks for all prompts before it adds the first.
        asks_for_more = 0 < share < job.asked
        if asks_for_more:
            await job.delivery.take_place(max(share // n, 1))

    async def examine(self, llm: EngineClient, params: Any) -> None:
        """Refuse a constraint that costs too much to compile, also one that vLLM has made.

        Raises:
            AdapterError: the reason for a refusal.
        """
        wanted = getattr(params, "structured_outputs", None)
        constraint = constraints.to_compile(self.fit.limits, wanted)
        if constraint is not None:
            await self.prompter.try_constraint(llm, constraint)


class CheckedEngine:
    """An AsyncLLM that refuses what the rules refuse.

    Args:
        llm: the engine. Everything that is not here is its own.
        rules: what a request must pass.
    """

    def __init__(self, llm: EngineClient, rules: Rules) -> None:
        self._llm = llm
        self._rules = rules

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    # Plain functions, so that they refuse before the application starts its response. vLLM's own
    # methods do the rest, and call `add_request` below.
    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *rest: Any, **options: Any
    ) -> AsyncIterator[Any]:
        """Check a request; return its outputs.

        Raises:
            Exception: vLLM's exception for the status of a refusal.
        """
        engine_class: Any = type(self._llm)
        return self._checked(
            engine_class.generate, prompt, sampling_params, request_id, *rest, **options
        )

    def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, *rest: Any, **options: Any
    ) -> AsyncIterator[Any]:
        """Check a request for pooling; return its output.

        Raises:
            Exception: vLLM's exception for the status of a refusal.
        """
        engine_class: Any = type(self._llm)
        return self._checked(
            engine_class.encode, prompt, pooling_params, request_id, *rest, **options
        )

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *rest: Any, **options: Any
    ) -> Collector:
        """Give a request to vLLM when it is its turn; note it in the current job.

        Raises:
            Exception: vLLM's exception for the status of a refusal.
        """
        rules = self._rules
        try:
            await rules.wait_for_seats(params)
            await rules.examine(self._llm, params)
            # A request may have hundreds of prompts, and vLLM tokenizes `bad_words` for each.
            await rules.prompter.take_turn()
            job = _job()
        except AdapterError as error:
            raise self._as_vllms(error) from None
        # The application knows an adapter by its name only. vLLM must get the one with the contents
        # that the request has found.
        if options.get("lora_request") is not None:
            options["lora_request"] = job.adapter.request if job.adapter else None
        add: Any = self._llm.add_request
        collector: Collector = await add(request_id, prompt, params, *rest, **options)
        job.delivery.follow(collector)
        rules.jobs.note(job, Subrequest(request_id, getattr(params, "n", 1)))
        return collector

    def _checked(
        self, method: Any, prompt: Any, params: Any, request_id: str, *rest: Any, **options: Any
    ) -> AsyncIterator[Any]:
        """Check a request; return the outputs of ``method`` for it.

        ``method`` is a function of vLLM's class. Called with this object as its ``self``, it adds
        the request by this class's ``add_request``.

        Raises:
            Exception: vLLM's exception for the status of a refusal.
        """
        try:
            self._rules.check(prompt, params)
        except AdapterError as error:
            raise self._as_vllms(error) from None
        outputs: AsyncIterator[Any] = method(self, prompt, params, request_id, *rest, **options)
        return outputs

    def _as_vllms(self, error: AdapterError) -> Exception:
        """Return vLLM's exception for a refusal. Note the refusal, which the middleware counts."""
        job = JOB.get()
        if job is not None:
            job.refused = job.refused or error
        return vllm_api.as_vllms(self._rules.vllm, error)


def _job() -> Job[Collected]:
    """Return the job of this task's request.

    Raises:
        AdapterError: it has been ended.
    """
    job = JOB.get()
    # Every way to the application leads through the middleware.
    if job is None:
        raise InternalError("the request has not come through the middleware")
    if job.error is not None:
        raise job.error
    return job
