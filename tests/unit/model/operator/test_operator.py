"""An operator puts the engine to sleep and wakes it up, if config.pbtxt lets whoever asks."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.engine_parts import PROMISED, Llm, TickingClock, added, output
from support.fake_reply import Asked, fake_job, fake_operation
from support.patience import wait_for
from triton_vllm.base.errors import DEAD, AdapterError, CancelledError, UnsupportedError
from triton_vllm.base.limits import Limits
from triton_vllm.engine.engine import UNLOADED
from triton_vllm.operator.request import OPERATIONS, OperatorRequest
from triton_vllm.operator.run import Told
from triton_vllm.reply.response import ToldAssembler
from triton_vllm.request.parse import parse

ALL = Limits(operator_requests=tuple(OPERATIONS))


def read(text, limits=ALL) -> Any:
    return parse({"operator_request": np.array([text.encode()], np.object_)}, "", limits=limits)


job = fake_operation


class Sleeper:
    """What AsyncLLM has for sleep, added to an engine's."""

    def __init__(self, llm, *, frees=False):
        self.levels = []
        llm.model_config = SimpleNamespace(enable_sleep_mode=frees)
        llm.sleep, llm.wake_up, llm.reset_prefix_cache = self.sleep, self.wake_up, self.reset
        self.error = None

    async def sleep(self, level):
        if self.error:
            raise self.error
        self.levels.append(level)

    async def wake_up(self):
        self.levels.append("awake")

    async def reset(self):
        return True


def told(engine, got, j):
    j.submit(engine)
    found, item = got.get(timeout=PROMISED)
    assert found is j.reply
    return item if isinstance(item, AdapterError) else dict(item.outputs)


def test_what_is_allowed_is_parsed():
    """With its arguments; the answer is JSON."""
    assert read('{"operation": "sleep", "level": 0}').request == OperatorRequest("sleep", {"level": 0})
    assert read('{"operation": "load_lora", "name": "a"}').request.arguments == {"name": "a"}
    ((_, text),) = ToldAssembler().build([Told({"asleep": True})])
    assert json.loads(text[0]) == {"asleep": True}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "operator_request must be a JSON object"),
        ("{}", "operation must be one of sleep, wake_up"),
        ('{"operation": ["sleep"]}', "operation must be one of sleep"),
        ('{"operation": "sleep", "level": true}', "level must be 0"),
        ('{"operation": "load_lora", "name": 1}', "name must be the name of an adapter"),
        ('{"operation": "sleep", "level": 2}', "level must be 0, which only pauses, or 1"),
        ('{"operation": "sleep", "tags": []}', "'sleep' has no argument 'tags'"),
        ('{"operation": "load_lora"}', "needs the name of an adapter"),
        ('{"operation": "collective_rpc"}', "operation must be one of"),
    ],
)
def test_what_is_malformed_is_refused(text, says):
    """With what would be right."""
    with pytest.raises(AdapterError, match=says):
        read(text)


@pytest.mark.parametrize("name", ["text_input", "embedding_request"])
def test_an_operation_goes_alone(name):
    """Another input would be ignored without a word."""
    given = {"operator_request": np.array([b"{}"], np.object_), name: np.array([b"x"], np.object_)}
    with pytest.raises(AdapterError, match=f"operator_request cannot be combined with {name}"):
        parse(given, "", limits=ALL)


def test_nothing_is_allowed_unless_the_operator_says_so():
    """Not even to know what there is."""
    with pytest.raises(UnsupportedError, match=r"takes no operator requests: OPERATOR_REQUESTS in its config.pbtxt lists none"):
        read('{"operation": "sleep"}', Limits())
    with pytest.raises(UnsupportedError, match="'sleep' is not allowed: OPERATOR_REQUESTS"):
        read('{"operation": "sleep"}', Limits(operator_requests=("wake_up",)))


@pytest.mark.parametrize(("frees", "level"), [(False, 0), (True, 1)])
def test_sleep_waits_for_what_is_in_flight(started, frees, level):
    """From its beginning on nothing else is taken; it frees memory where the engine can."""
    engine, got = started()
    llm, put = added(engine, fake_job())
    sleeper = Sleeper(llm, frees=frees)
    (j := job("sleep")).submit(engine)
    wait_for(lambda: engine.runner.operator.asleep)
    assert (sleeper.levels, j.job.ended) == ([], False)
    put(output(finished=True))
    got.get(timeout=PROMISED)
    assert dict(got.get(timeout=PROMISED)[1].outputs) == {"operation": "sleep", "asleep": True}
    assert sleeper.levels == [level]
    assert told(engine, got, job("wake_up")) == {"operation": "wake_up", "asleep": False}
    assert not engine.runner.operator.asleep
    assert told(engine, got, job("is_sleeping")) == {"operation": "is_sleeping", "asleep": False}
    assert told(engine, got, job("reset_prefix_cache")) == {"operation": "reset_prefix_cache", "reset": True}


def test_a_sleep_that_is_cancelled_or_fails_leaves_the_model_awake(started):
    """Nobody else would know to wake it up."""
    engine, got = started()
    llm, _ = added(engine, fake_job())
    sleeper = Sleeper(llm)
    (j := job("sleep")).submit(engine)
    wait_for(lambda: engine.runner.operator.asleep)
    engine.jobs.cancel(j.job)
    assert isinstance(got.get(timeout=PROMISED)[1], CancelledError)
    wait_for(lambda: not engine.runner.operator.asleep)
    assert sleeper.levels == []
    assert isinstance(told(engine, got, job("sleep", level=1)), UnsupportedError)
    engine.jobs.cancel(next(iter(engine.jobs.ledger.jobs())))
    assert isinstance(got.get(timeout=PROMISED)[1], CancelledError)
    sleeper.error = RuntimeError("secret")
    assert "secret" not in str(told(engine, got, job("sleep")))
    assert not engine.runner.operator.asleep
    added(engine, fake_job())


def test_an_engine_that_was_started_again_is_awake(started):
    """It knows nothing of the sleep before."""
    engine, got = started()
    Sleeper(Llm.started[-1])
    told(engine, got, job("sleep"))
    assert engine.runner.operator.asleep
    Llm.started[-1].errored = True
    wait_for(lambda: len(Llm.started) == 2 and engine.jobs.is_up())
    assert not engine.runner.operator.asleep


def begun_and_hanging(engine: Any) -> tuple[Any, Asked]:
    """Ask for a `wake_up` that the engine does not answer."""
    llm: Any = Llm.started[-1]
    Sleeper(llm)
    llm.hangs = True
    llm.wake_up = llm.is_sleeping
    (asked := job("wake_up")).submit(engine)
    return llm, asked


def test_an_engine_that_hangs_is_noticed_by_an_operator_request_alone(started):
    """It would wait for ever: it has no timeout, and no other request is in flight."""
    engine, got = started(silence=40.0)
    clock = TickingClock(engine)
    llm, j = begun_and_hanging(engine)
    wait_for(lambda: llm.asked._value == 2, "the operator's call and the engine's own question")
    clock.now += 41
    found, item = got.get(timeout=PROMISED)
    assert (found, str(item)) == (j.reply, DEAD)


def test_a_server_that_ends_answers_an_operator_request_before_it_ends_the_engine(started):
    """Without a request the engine ends at once."""
    engine, got = started()
    llm, _ = begun_and_hanging(engine)
    wait_for(lambda: llm.waits)
    engine.leave(0)
    assert str(got.get(timeout=PROMISED)[1]) == UNLOADED
    wait_for(lambda: llm.closed)
