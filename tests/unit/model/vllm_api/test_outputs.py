"""A request with log probabilities must not make others wait for what vLLM's handler has not handled yet."""

from __future__ import annotations

import asyncio
import pickle
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from triton_vllm.vllm_api import outputs as outputs_
from triton_vllm.vllm_api.outputs import PACKED_FROM_OUTPUTS, SLICE_OUTPUTS, deliver_fairly
from triton_vllm.vllm_api.outputs import STEPS_IN_A_ROW as FIRST

MANY = [f"dear {number}" for number in range(40)]
STEPS = 20


class Pickled:
    """Packs outputs as the real packer does, which needs vLLM (`tests/e2e/test_held_outputs.py`)."""

    pack = staticmethod(pickle.dumps)
    unpack = staticmethod(pickle.loads)


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let outputs be packed without vLLM."""
    monkeypatch.setattr(outputs_, "Packer", Pickled)


@pytest.fixture
def packed_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Set how many held outputs are not packed."""
    monkeypatch.setattr(outputs_, "PACKED_FROM_OUTPUTS", request.param)
    return request.param


with_packed = pytest.mark.parametrize("packed_from", [0, 100, PACKED_FROM_OUTPUTS], indirect=True)


@dataclass
class Output:
    """An output of a request, like vLLM's EngineCoreOutput."""

    request_id: str
    number: int
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None


@dataclass
class Message:
    """The outputs of one step, like vLLM's EngineCoreOutputs."""

    timestamp: float
    outputs: list[Output] = field(default_factory=list)
    scheduler_stats: Any = None


class Client:
    """An engine's client with a queue, like AsyncLLM; each test fills the queue."""

    def __init__(self, messages: list[Message]) -> None:
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.get_output_async = self.outputs_queue.get
        self.engine_core = self
        self.output_processor = SimpleNamespace(request_states=set())
        for message in messages:
            self.arrive(message)
        deliver_fairly(self)

    def arrive(self, message: Message) -> None:
        """Add what EngineCore has sent."""
        self.outputs_queue.put_nowait(message)
        self.output_processor.request_states |= {output.request_id for output in message.outputs}

    async def take(self) -> Message:
        """Take a message as vLLM's output handler does."""
        return await self.get_output_async()

    async def take_all(self, outputs: int) -> list[Message]:
        """Take messages until they had that many outputs."""
        messages: list[Message] = []
        while sum(len(message.outputs) for message in messages) < outputs:
            messages.append(await asyncio.wait_for(self.take(), 10))
        return messages


def step(number: int, *cheap: str, dear: list[str] = MANY) -> Message:
    """Return the outputs of one step of the engine."""
    outputs = [Output(name, number, new_logprobs=[0.5]) for name in dear]
    return Message(float(number), [*outputs, *(Output(name, number) for name in cheap)], f"figures {number}")


def numbers(messages: list[Message], request: str) -> list[int]:
    """Return the steps of a request's outputs, in the order in which they were given."""
    return [output.number for message in messages for output in message.outputs if output.request_id == request]


@with_packed
async def test_nothing_is_lost_or_overtaken_and_times_and_figures_stay_right(packed_from):
    """Each request gets its own outputs in their order, each as old as its step; a step's figures come once."""
    client = Client([step(number, "other") for number in range(STEPS)])
    messages = await client.take_all(STEPS * (len(MANY) + 1))
    for name in [*MANY, "other"]:
        assert numbers(messages, name) == list(range(STEPS))
    assert all(message.timestamp == output.number for message in messages for output in message.outputs)
    figures = [message.scheduler_stats for message in messages if message.scheduler_stats]
    assert figures == [f"figures {number}" for number in range(STEPS)]


@with_packed
async def test_outputs_without_log_probabilities_go_first(packed_from):
    """But for one slice now and then, whatever has queued up."""
    client = Client([step(number) for number in range(STEPS)])
    await client.take()
    client.arrive(step(STEPS, "other", dear=[]))
    seen = await client.take_all(STEPS * len(MANY) + 1)
    before = [len(message.outputs) for message in seen[: next(i for i, m in enumerate(seen) if numbers([m], "other"))]]
    assert sum(before) <= SLICE_OUTPUTS * (1 + STEPS // FIRST)
    assert max(before) <= SLICE_OUTPUTS


@with_packed
async def test_a_new_request_with_log_probabilities_waits_for_one_output_of_each_other(packed_from):
    """Not for all that the others have waiting."""
    client = Client([step(number) for number in range(STEPS)])
    for _ in range(2 * STEPS):
        await client.take()
    client.arrive(step(STEPS, dear=["new"]))
    messages: list[Message] = []
    while not numbers(messages, "new"):
        messages.append(await client.take())
    assert sum(len(message.outputs) for message in messages) <= len(MANY) + 2 * SLICE_OUTPUTS


@pytest.mark.parametrize("packed_from", [len(MANY)], indirect=True)
async def test_of_many_held_outputs_only_the_first_ones_are_kept_as_objects(packed_from):
    """Objects take more memory, and keep the memory around them in use."""
    messages = [step(number) for number in range(FIRST)]
    sent = [weakref.ref(output) for message in messages for output in message.outputs]
    client = Client(messages)
    del messages
    for _ in range(FIRST):
        await client.take()
    kept = [output for output in (one() for one in sent) if output]
    assert [output.number for output in kept] == [0] * packed_from
    given = [output for message in await client.take_all(len(sent)) for output in message.outputs]
    assert given[:packed_from] == kept
    assert [output.number for output in given] == [number for number in range(FIRST) for _ in MANY]


@with_packed
async def test_what_follows_a_held_output_of_its_request_waits_as_well(packed_from):
    """Only the first output has the prompt's log probabilities."""
    first = Message(0.0, [Output("it", 0, new_prompt_logprobs_tensors=[0.5])])
    later = [Message(1.0, [Output("it", 1), Output("other", 1)]), Message(2.0, [Output("it", 2)])]
    client = Client([step(-1), first, *later])
    given = [output for message in await client.take_all(len(MANY) + 4) for output in message.outputs]
    assert [output.number for output in given if output.request_id == "it"] == [0, 1, 2]
    assert next(output.request_id for output in given if output.request_id not in MANY) == "other"


@with_packed
async def test_held_outputs_of_an_aborted_request_are_dropped(packed_from):
    """Nobody waits for them."""
    client = Client([step(number) for number in range(STEPS)])
    for _ in range(STEPS):
        await client.take()
    client.output_processor.request_states.clear()
    while not client.outputs_queue.empty():
        await client.take()
    waits = asyncio.create_task(client.take())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waits.done()
    client.arrive(step(STEPS, "other", dear=[]))
    assert numbers([await waits], "other") == [STEPS]


async def test_between_two_steps_other_tasks_run():
    """A handler that has fallen behind would work off everything first; a cancellation that waits would come too late."""
    client = Client([step(number, dear=["one"]) for number in range(100)])
    seen: list[int] = []
    asyncio.get_running_loop().call_soon(lambda: seen.append(client.outputs_queue.qsize()))
    for _ in range(100):
        await client.take()
    assert seen[0] >= 98
