"""Where a prompt is tokenized depends on its length; test_turns.py has the turns that short ones take.

vLLM's renderer is replaced by a small stand-in here; the event loop is real. test_model_exact.py has the real one.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.engine import tokenizing
from triton_vllm.engine.turns import Turns


class Pooled:
    """In place of the tokenizers that vLLM pools."""


class Renderer:
    """In place of vLLM's; keeps what was asked of it and in which round of the loop."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.round = 0
        self.done: list[tuple[str, int]] = []

    def render_cmpl(self, prompts):
        self.done.append(("loop", self.round))
        return prompts

    async def render_cmpl_async(self, prompts):
        self.done.append(("thread", self.round))
        return prompts


async def rendered(sizes, tokenizer=None, pooled=Pooled, most=0):
    """Render prompts of these sizes, all of which arrive at once; return where and when each was tokenized."""
    renderer = Renderer(tokenizer or Pooled())
    vllm: Any = SimpleNamespace(parse_model_prompt=lambda _config, prompt: prompt, ThreadSafeHFTokenizerMixin=pooled)
    config = SimpleNamespace(max_model_len=most, is_multimodal_model=False, get_vocab_size=lambda: 0)
    llm: Any = SimpleNamespace(renderer=renderer, model_config=config)
    turns = Turns(clock=iter(range(1000)).__next__)  # each look at it is a second later: the budget is spent at once
    prompts = [{"prompt": "x" * size} for size in sizes]
    tasks = [asyncio.create_task(tokenizing.tokenize(vllm, llm, prompt, turns)) for prompt in prompts]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        renderer.round += 1
    assert [task.result() for task in tasks] == prompts
    return renderer.done


@pytest.mark.parametrize(
    ("size", "place"),
    [(0, "loop"), (tokenizing.LONGEST_IN_LOOP, "loop"), (tokenizing.LONGEST_IN_LOOP + 1, "thread")],
)
def test_only_a_long_prompt_goes_to_another_thread(size, place):
    """Up to the limit the event loop tokenizes itself, which costs less than a hand-over."""
    ((where, _),) = asyncio.run(rendered([size]))
    assert where == place


@pytest.mark.parametrize(("size", "place"), [(0, "loop"), (1, "thread")])
@pytest.mark.parametrize(("tokenizer", "pooled"), [(object(), Pooled), (Pooled(), None)])
def test_a_tokenizer_that_is_not_pooled_stays_with_one_thread(size, place, tokenizer, pooled):
    """Token ids need none."""
    ((where, _),) = asyncio.run(rendered([size], tokenizer, pooled))
    assert where == place


class Letters(Pooled):
    """A tokenizer that makes a token of every so many characters, and keeps what it was given."""

    def __init__(self, characters):
        self.characters = characters
        self.pieces = []

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        self.pieces.append(text)
        return [1] * (len(text) // self.characters)


@pytest.mark.parametrize("size", [10 * tokenizing.PIECE, 100 * tokenizing.PIECE])
def test_a_text_with_too_many_tokens_costs_no_more_than_one_that_fits(size):
    """However long it is: the rest of it is not looked at."""
    tokenizer = Letters(1)
    most = tokenizing.PIECE
    text = f"the prompt has at least {2 * most} tokens; this model's maximum context length is {most} tokens"
    with pytest.raises(InvalidRequestError, match=text):
        asyncio.run(rendered([size], tokenizer, most=most))
    assert len(tokenizer.pieces) == 2


def test_a_long_text_of_few_tokens_is_tokenized():
    """Runs of spaces, say; all of it was counted."""
    tokenizer, size = Letters(32), 9 * tokenizing.PIECE + 7
    assert asyncio.run(rendered([size], tokenizer, most=tokenizing.PIECE)) == [("thread", pytest.approx(0, abs=1e9))]
    assert "".join(tokenizer.pieces) == "x" * size


def test_long_texts_are_counted_by_turns():
    """The second does not wait until the first is counted."""
    tokenizer = Letters(64)
    sizes = [9 * tokenizing.PIECE, 9 * tokenizing.PIECE + 1]
    asyncio.run(rendered(sizes, tokenizer, most=tokenizing.PIECE))
    assert {len(piece) for piece in tokenizer.pieces[-2:]} == {1, tokenizing.PIECE}
