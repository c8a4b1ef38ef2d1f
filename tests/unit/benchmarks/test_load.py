"""Loads: what is asked, in which order, when, and what is not waited for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.workload import Load


class Echo:
    """A client that answers with the tokens it is asked for, and notes what it was asked."""

    def __init__(self, before: Callable[[int], Any] = lambda _: None) -> None:
        self.asked: list[Any] = []
        self._before = before

    async def ask(self, request: Any, answer: Any) -> None:
        self.asked.append(request)
        await asyncio.sleep(0)
        if wait := self._before(len(self.asked)):
            await wait
        for i in range(request.parameters["max_tokens"]):
            answer.add((f"{' ' if i else ''}w{i + 4}",), 1)

    async def close(self) -> None:
        """Nothing is open."""


def load(**values: Any) -> Load:
    """Return a load of twelve requests, three at a time."""
    from harness.workload import Load

    return Load(
        **{"in_flight": 3, "requests": 12, "prompt_tokens": 5, "answer_tokens": 4, "stream": True, "vocabulary": 100} | values
    )


async def test_the_closed_loop_asks_as_many_as_it_is_to() -> None:
    """All clients work, the prompts are the seed's, the count is exact without a window."""
    from harness.load import run_load

    clients = [Echo() for _ in range(3)]
    found = await run_load(clients, load())
    prompts = sorted(request.prompt for client in clients for request in client.asked)
    assert (found.completed, found.output_tokens, found.pieces_per_answer) == (12, 48, 4.0)
    assert all(client.asked for client in clients)
    again = [Echo() for _ in range(2)]
    await run_load(again, load(in_flight=2))
    assert sorted(request.prompt for client in again for request in client.asked) == prompts


@pytest.mark.parametrize("workload", ["closed", "open"])
async def test_a_wrong_answer_ends_the_load(workload: str) -> None:
    """A target that sends fewer tokens than it was asked for is not measured."""
    from harness.load import WrongAnswerError, run_load

    class Short(Echo):
        async def ask(self, request: Any, answer: Any) -> None:
            answer.add(("w5",), 1)

    with pytest.raises(WrongAnswerError, match="1 tokens instead of 4"):
        await run_load([Short()], load(rate=1000.0 if workload == "open" else 0.0))


async def test_a_conversation_carries_what_was_said() -> None:
    """Each turn begins with the prompt and the answer before it, which is what a prefix cache has."""
    from harness.load import run_load

    client = Echo()
    await run_load([client], load(in_flight=1, requests=5, workload="multi-turn", turns=3))
    prompts = [request.prompt for request in client.asked]
    assert [len(prompt.split()) for prompt in prompts] == [5, 14, 23, 5, 14]
    assert prompts[1].startswith(f"{prompts[0]} w4 w5 w6 w7 w")
    assert prompts[2].startswith(f"{prompts[1]} w4")
    assert not prompts[3].startswith(prompts[0])
