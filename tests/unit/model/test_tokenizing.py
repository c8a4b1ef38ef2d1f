"""Where a prompt is tokenized depends on its length.

vLLM's renderer is replaced by a small stand-in here; the event loop is real. test_model_exact.py has the real one.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from triton_vllm.inference import tokenizing


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


async def rendered(sizes, tokenizer=None, pooled=Pooled):
    """Render prompts of these sizes, all of which arrive at once; return where and when each was tokenized."""
    renderer = Renderer(tokenizer or Pooled())
    vllm = SimpleNamespace(parse_model_prompt=lambda _config, prompt: prompt, ThreadSafeHFTokenizerMixin=pooled)
    llm = SimpleNamespace(renderer=renderer, model_config=None)
    turn = asyncio.Lock()
    prompts = [{"prompt": "x" * size} for size in sizes]
    tasks = [asyncio.create_task(tokenizing.tokenize(vllm, llm, prompt, turn)) for prompt in prompts]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        renderer.round += 1
    assert [task.result() for task in tasks] == prompts
    return renderer.done


@pytest.mark.parametrize(
    ("size", "place"),
    [(0, "loop"), (tokenizing.MEDIUM_TEXT, "loop"), (tokenizing.MEDIUM_TEXT + 1, "thread")],
)
def test_only_a_long_prompt_goes_to_another_thread(size, place):
    """Up to the limit the event loop tokenizes itself, which costs less than a hand-over."""
    ((where, _),) = asyncio.run(rendered([size]))
    assert where == place


def test_short_prompts_are_tokenized_together():
    """A burst of them is done in one round of the event loop."""
    assert asyncio.run(rendered([tokenizing.SHORT_TEXT] * 5)) == [("loop", 0)] * 5


def test_the_loop_turns_between_prompts_of_medium_length():
    """Else the streams of others would stand still until all of a burst are tokenized."""
    rounds = [number for _, number in asyncio.run(rendered([tokenizing.SHORT_TEXT + 1] * 5))]
    assert len(set(rounds)) == 5, rounds


@pytest.mark.parametrize(("size", "place"), [(0, "loop"), (1, "thread")])
@pytest.mark.parametrize(("tokenizer", "pooled"), [(object(), Pooled), (Pooled(), None)])
def test_a_tokenizer_that_is_not_pooled_stays_with_one_thread(size, place, tokenizer, pooled):
    """Token ids need none."""
    ((where, _),) = asyncio.run(rendered([size], tokenizer, pooled))
    assert where == place
