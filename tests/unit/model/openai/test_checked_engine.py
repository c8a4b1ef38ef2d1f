"""The engine as vLLM's application sees it: what passes the gate, and how a request is ended."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from support.engine_parts import Log
from triton_vllm.base.errors import InvalidRequestError, UnavailableError
from triton_vllm.base.limits import USUAL
from triton_vllm.base.refusals import Refusals
from triton_vllm.engine.fit import Fit
from triton_vllm.engine.gate import Gate
from triton_vllm.engine.jobs import Jobs
from triton_vllm.engine.outcome import Translator
from triton_vllm.engine.turns import Turns
from triton_vllm.instances.counts import Counts
from triton_vllm.instances.sleep import SleepState
from triton_vllm.lora.config import Adapters
from triton_vllm.openai import checked_engine
from triton_vllm.openai.checked_engine import JOB, CheckedEngine, Rules
from triton_vllm.openai.delivery import Collected
from triton_vllm.operator.run import Operator
from triton_vllm.vllm_api import Facts


class BusyError(Exception):
    """In place of GracefulHTTPError."""

    def __init__(self, text, status):
        super().__init__(text)
        self.status = status


class ClientError(Exception):
    """In place of VLLMClientError."""


KINDS = SimpleNamespace(FINAL_ONLY=object(), DELTA=object())
VLLM: Any = SimpleNamespace(
    refusals=(ClientError,), busy_errors=(BusyError,), client_errors=(ClientError,), RequestOutputKind=KINDS
)


class Collector:
    """As vLLM's."""

    def __init__(self):
        self.items: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, item):
        self.items.put_nowait(item)


class Llm:
    """In place of AsyncLLM: its `generate` calls its own `add_request`, as vLLM's does."""

    errored = False
    log_requests = False

    def __init__(self):
        self.collectors: dict[str, Collector] = {}
        self.aborted: list[str] = []
        self.loras: list[Any] = []

    async def add_request(self, request_id, prompt, params, **options):
        self.loras.append(options["lora_request"])
        self.collectors[request_id] = Collector()
        return self.collectors[request_id]

    async def abort(self, request_id):
        self.aborted.append(request_id)

    async def generate(self, prompt, sampling_params, request_id, *, lora_request=None):
        collector = await self.add_request(request_id, prompt, sampling_params, lora_request=lora_request)
        while True:
            item = await collector.items.get()
            if isinstance(item, Exception):
                raise item
            yield item


class Prompter:
    """Refuses every constraint."""

    def __init__(self):
        self.turns = Turns(budget=1, clock=lambda: self.now)
        self.now = 0

    async def take_turn(self):
        await self.turns.take()

    async def try_constraint(self, llm, constraint):
        raise InvalidRequestError("too dear")


def params(**values):
    """Return what a request asks for."""
    return SimpleNamespace(**{"n": 1, "max_tokens": 5, "structured_outputs": None, **values})


@pytest.fixture
async def place():
    """A checked engine, the engine behind it, the runner and the request that this task works on."""
    llm: Any = Llm()
    prompter: Any = Prompter()
    facts, limits = Facts(max_tokens=100, vocabulary=50), replace(USUAL, max_requests_in_flight=10)
    jobs = Jobs(asyncio.get_running_loop(), Translator(VLLM, Log()), limits, Counts(), Log())
    jobs.use(llm)
    state = SleepState()
    operator = Operator(jobs.ledger.count_of_all, state, None, Log())
    fit = Fit(facts, limits, Gate(jobs, operator, limits, None))
    rules = Rules(VLLM, fit, jobs, operator, None, prompter, Adapters(), Refusals())
    job = jobs.begin(Collected(VLLM, jobs.note_output))
    token = JOB.set(job)
    place = SimpleNamespace(
        checked=CheckedEngine(llm, rules),
        llm=llm,
        prompter=prompter,
        jobs=jobs,
        job=job,
        sleep=state,
        rules=rules,
    )

    def change(**values):
        own = place.checked._rules
        changed = replace(own.fit, limits=replace(limits, **values))
        place.checked = CheckedEngine(llm, replace(own, fit=changed))

    def give(seats):
        own = place.checked._rules
        changed = replace(own.fit, facts=replace(facts, seats=seats))
        place.checked = CheckedEngine(llm, replace(own, fit=changed))

    place.seats = give
    place.limits = change
    yield place
    JOB.reset(token)


async def test_outputs_pass_and_count_as_movement(place):
    """The engine counts as working while it gives outputs, whichever API they are for."""
    outputs = place.checked.generate({"prompt_token_ids": [1]}, params(), "one")
    first = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(0)
    place.llm.collectors["one"].put("output")
    assert await first == "output"
    assert place.jobs.last_output_at > 0


async def test_no_adapter_is_loaded_into_an_engine_that_sleeps(place):
    """Another instance may have put it to sleep since this request was admitted."""
    acquired = []

    class Store:
        async def acquire(self, llm, name):
            acquired.append(name)

    store: Any = Store()
    rules = replace(place.rules, store=store, adapters=Adapters(enabled=True, listed={"a": "/a"}))
    await rules.adapter(place.llm, "a")
    place.sleep.closed = True
    with pytest.raises(UnavailableError, match="asleep"):
        await rules.adapter(place.llm, "a")
    assert acquired == ["a"]


async def test_a_model_that_fell_asleep_meanwhile_refuses(place):
    """The middleware was passed before."""
    place.sleep.closed = True
    with pytest.raises(BusyError, match="asleep") as raised:
        place.checked.generate({}, params(), "one")
    assert raised.value.status == 503


async def test_completions_count(place):
    """One for the request, which the first completion is, and one for each other."""
    assert place.jobs.ledger.count() == 1
    place.checked.generate({}, params(n=4), "one")
    assert place.jobs.ledger.count() == 4
    place.checked.generate({}, params(n=4), "two")
    assert place.jobs.ledger.count() == 8
    with pytest.raises(ClientError, match="12 completions or inputs"):
        place.checked.generate({}, params(n=4), "three")
    JOB.set(place.jobs.begin(Collected(VLLM, place.jobs.note_output)))
    with pytest.raises(BusyError, match="more than 10 requests"):
        place.checked.generate({}, params(n=3), "four")
    place.jobs.finish(place.job)
    place.checked.generate({}, params(n=3), "four")
    assert place.jobs.ledger.count() == 3


async def test_the_prompts_of_a_request_cost_together(place):
    """vLLM's application copies the lists for each, and answers all at once."""
    ids = params(allowed_token_ids=[*range(50)])
    place.limits(max_token_ids=100)
    for number in range(2):
        place.checked.generate({}, ids, str(number))
    with pytest.raises(ClientError, match="for all prompts 150 token ids; this model takes at most 100: send fewer"):
        place.checked.generate({}, ids, "three")


async def test_so_do_their_log_probabilities(place):
    """Each is small enough."""
    place.limits(max_logprob_values=100)
    for number in range(2):
        place.checked.generate({"prompt_token_ids": [1]}, params(logprobs=10), str(number))
    with pytest.raises(ClientError, match="for all prompts 150 values; this model takes at most 100: send fewer"):
        place.checked.generate({"prompt_token_ids": [1]}, params(logprobs=10), "three")


@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("kind", [KINDS.FINAL_ONLY, KINDS.DELTA], ids=["whole", "streamed"])
async def test_a_whole_answer_of_several_completions_has_few_log_probabilities(place, prompts, kind, monkeypatch):
    """vLLM makes it in one piece in the event loop. A stream may have as many as the limit allows."""
    monkeypatch.setattr(checked_engine, "IN_ONE_PIECE", 100)
    asked = params(n=4 // prompts, logprobs=10, output_kind=kind)
    for number in range(prompts - 1):
        place.checked.generate({"prompt_token_ids": [1]}, asked, f"before {number}")
    refused = pytest.raises(ClientError, match="without stream, 200 values; this model takes at most 100: set stream, or send")
    with nullcontext() if kind is KINDS.DELTA else refused:
        place.checked.generate({"prompt_token_ids": [1]}, asked, "last")


async def test_an_operator_may_lift_this_limit_as_well(place, monkeypatch):
    """With the limit of log probabilities."""
    monkeypatch.setattr(checked_engine, "IN_ONE_PIECE", 40)
    place.limits(max_logprob_values=0)
    place.checked.generate({"prompt_token_ids": [1]}, params(n=2, logprobs=10, output_kind=KINDS.FINAL_ONLY), "two")


async def test_a_constraint_that_vllm_made_is_tried(place):
    """As for tools, whose constraint is made after the middleware."""
    wanted = SimpleNamespace(json={"type": "object"})
    with pytest.raises(ClientError, match="too dear"):
        await anext(place.checked.generate({}, params(structured_outputs=wanted), "one"))
    assert place.llm.collectors == {}


async def test_a_request_that_is_ended_gets_the_reason_and_is_aborted(place):
    """When the model is unloaded, or its time is over."""
    waiting = asyncio.ensure_future(anext(place.checked.generate({}, params(), "one")))
    await asyncio.sleep(0)
    place.jobs.refuse_all("unloaded")
    with pytest.raises(BusyError, match="unloaded"):
        await waiting
    await asyncio.sleep(0)
    assert place.llm.aborted == ["one"]
    with pytest.raises(BusyError, match="unloaded"):
        place.checked.generate({}, params(), "two")


async def test_what_joins_a_request_that_has_ended_is_aborted(place):
    """vLLM would work on it for nobody."""
    added, go_on = asyncio.Event(), asyncio.Event()
    add = place.llm.add_request

    async def slow(*args, **options):
        added.set()
        await go_on.wait()
        return await add(*args, **options)

    place.llm.add_request = slow
    waiting = asyncio.ensure_future(anext(place.checked.generate({}, params(), "one")))
    await added.wait()
    place.jobs.refuse_all("unloaded")
    go_on.set()
    with pytest.raises(BusyError, match="unloaded"):
        await waiting
    await asyncio.sleep(0)
    assert place.llm.aborted == ["one"]


async def test_a_list_of_prompts_takes_its_share_of_the_seats(place):
    """Half of eight, so two prompts with two completions each; the next one follows when one has finished or failed."""
    place.seats(8)
    outputs = [place.checked.generate({}, params(n=2), str(number)) for number in range(5)]
    waiting = [asyncio.ensure_future(anext(output)) for output in outputs]
    added = place.llm.collectors

    async def taken():
        for _ in range(10):
            await asyncio.sleep(0)
        return [*added]

    assert await taken() == ["0", "1"]
    added["0"].put(SimpleNamespace(finished=False))
    assert await taken() == ["0", "1"]
    added["0"].put(SimpleNamespace(finished=True))
    assert await taken() == ["0", "1", "2"]
    added["1"].put(SimpleNamespace(finished=True))
    added["2"].put(ClientError("failed"))
    assert await taken() == ["0", "1", "2", "3", "4"]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_list_that_is_ended_adds_no_more(place):
    """The prompts that wait for a seat end with their request."""
    place.seats(2)
    outputs = [place.checked.generate({}, params(), str(number)) for number in range(3)]
    waiting = [asyncio.ensure_future(anext(output)) for output in outputs]
    await asyncio.sleep(0)
    place.jobs.refuse_all("unloaded")
    place.llm.collectors["0"].put(SimpleNamespace(finished=True))
    with pytest.raises(BusyError, match="unloaded"):
        await waiting[1]
    assert [*place.llm.collectors] == ["0"]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize(("seats", "max_n"), [(8, 0), (16, None), (0, None), (4, 8)])
async def test_a_list_within_its_share_waits_for_nothing(place, seats, max_n):
    """Nor does one without a limit."""
    place.limits(max_n=max_n)
    place.seats(seats)
    outputs = [place.checked.generate({}, params(), str(number)) for number in range(8)]
    waiting = [asyncio.ensure_future(anext(output)) for output in outputs]
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(place.llm.collectors) == 8
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_task_that_outlives_its_request_gets_nothing(place):
    """Its completions would count until the server ends: nothing takes them off the ledger."""
    place.jobs.finish(place.job)
    with pytest.raises(BusyError, match="cancelled"):
        place.checked.generate({}, params(n=4), "late")
    assert place.jobs.ledger.is_empty()


async def test_a_request_that_waits_for_too_long_is_found(place):
    """Until vLLM has begun to work on it."""
    requests, request = place.jobs.ledger, place.job
    assert requests.overdue(request.waiting_since, place.llm) == []
    later = request.waiting_since + 1
    assert requests.overdue(later, place.llm) == [request]
    waiting = asyncio.ensure_future(anext(place.checked.generate({}, params(), "one")))
    await asyncio.sleep(0)
    state = SimpleNamespace(is_prefilling=True)
    place.llm.output_processor = SimpleNamespace(request_states={"one": state}, parent_requests={})
    assert requests.overdue(later, place.llm) == [request]
    state.is_prefilling = False
    assert requests.overdue(later, place.llm) == []
    state.is_prefilling = True
    assert requests.overdue(later, place.llm) == []
    waiting.cancel()
