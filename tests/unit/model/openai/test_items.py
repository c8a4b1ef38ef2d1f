"""How the errors of lists are bounded; tests/hostile/test_openai_port.py has vLLM's own judgement of the items."""

from __future__ import annotations

from typing import Any

import pytest

from triton_vllm.base.errors import AdapterError
from triton_vllm.openai.items import Listed, drop_log_probabilities
from triton_vllm.vllm_api import BodyType

MOST_VALUES = 256


class Strict:
    """A class with 233 errors for each item without a role, as vLLM's has for an item that it does not know."""

    asked: list[list[Any]]

    @classmethod
    def model_validate(cls, body: dict[str, Any]) -> None:
        """Raise what pydantic raises."""
        cls.asked.append(body["input"])
        count = 233 * sum("role" not in item for item in body["input"])
        if count:
            error = ValueError("wrong")
            error.error_count = lambda: count  # type: ignore[attr-defined]
            raise error


async def check(items: list[Any]) -> int:
    """Check the input of a response; return how often others had their turn."""
    turns: list[None] = []

    async def take_turn() -> None:
        turns.append(None)

    Strict.asked = []
    await Listed(BodyType((Strict,), frozenset({"input"})), "input", items, MOST_VALUES).check(take_turn)
    return len(turns)


def message(*parts: Any) -> dict[str, Any]:
    """Return a message with these parts."""
    return {"role": "user", "content": [*parts]}


TEXT = {"type": "input_text", "text": "x"}


async def test_items_without_errors_may_be_many():
    """Whatever their form is; others have a turn after each few."""
    assert await check([{"role": "user", "of a newer vLLM": {"a": 1}}] * 4096) == 4096 / 16


async def test_nobody_counts_the_errors_to_the_end():
    """The answer names the items that were looked at last."""
    with pytest.raises(AdapterError, match=r"^input\[16\] to input\[31\] have missing, wrong or unknown fields"):
        await check([{}] * 4096)
    assert sum(map(len, Strict.asked)) == 32


async def test_the_values_of_an_item_are_bounded():
    """An item with a list costs as much as many; large ones are looked at alone."""
    await check([message(*[5] * (MOST_VALUES - 3))] * 3)
    assert [len(some) for some in Strict.asked] == [1, 1, 1]
    with pytest.raises(AdapterError, match=r"^input\[1\] has 257 values or more"):
        await check([{"role": "user"}, message(*[5] * MOST_VALUES)])


async def test_texts_that_are_alike_count_as_one():
    """vLLM takes all of them or none."""
    await check([message(), message(*[TEXT] * 4000), {"type": "x", "role": "tool", "output": [TEXT] * 4000}])
    assert [some[0].get("content", some[0].get("output")) for some in Strict.asked] == [[], [TEXT], [TEXT]]
    with pytest.raises(AdapterError, match=r"^input\[0\] to input\[0\] have missing"):
        await check([{"content": [TEXT] * 4000}])


@pytest.mark.parametrize(
    "other", [{**TEXT, "text": 5}, {**TEXT, "type": "x"}, {**TEXT, "a": 1}, {"type": "input_text"}, 5, []], ids=str
)
async def test_one_that_differs_makes_all_of_them_count(other):
    """It may be the one that vLLM refuses."""
    for parts in ([*[TEXT] * 200, other], [other, *[TEXT] * 200]):
        with pytest.raises(AdapterError, match=r"^input\[0\] has 257 values or more"):
            await check([message(*parts)])


@pytest.mark.parametrize("value", [None, "text", [5, {"content": "text"}, {"content": [5, TEXT]}, {"role": "user"}]], ids=str)
def test_an_input_without_log_probabilities_stays(value):
    """The body is passed on as it came."""
    before = repr(value)
    assert not drop_log_probabilities(value)
    assert repr(value) == before


async def test_an_answer_that_comes_back_may_have_log_probabilities():
    """Clients send all that they got, the figures of hundreds of tokens, too; vLLM reads the text only."""
    token = {"token": "x", "bytes": [120], "logprob": -1.5, "top_logprobs": [{"token": "x", "bytes": [120], "logprob": -1.5}] * 5}
    said = {"type": "output_text", "text": "x", "annotations": []}
    items = [{"role": "assistant", "content": [{**said, "logprobs": [token] * 300}, {**said, "logprobs": []}]}]
    assert drop_log_probabilities(items)
    assert items == [{"role": "assistant", "content": [said, said]}]
    await check(items)
