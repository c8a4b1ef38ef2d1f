"""Decide where prompts are tokenized, and when.

Tokenizing a short prompt costs less than handing it to another thread. Tokenizing a long one in the loop, or many short ones
at once, delays the outputs of all other requests.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.base.protocols import EngineClient
    from triton_vllm.engine.turns import Turns

LONGEST_IN_LOOP = 16384
"""Characters of a prompt that are tokenized in the event loop, about 5 ms for English. Another thread costs two hand-overs of
Python's lock for each request: with 256 arriving at once, a fifth of all that was spent on taking them in."""

USUAL_CHARACTERS = 8
"""Characters for each token of the model's length; longer texts seldom fit, and are counted before vLLM's one thread has them."""
PIECE = 65_536
"""Characters that are counted at once, about 50 ms."""


def needs_thread(prompt: Mapping[str, Any], *, pooled: bool) -> bool:
    """Return whether a prompt is tokenized in a thread of vLLM's.

    Args:
        prompt: as vLLM takes it; token ids need no tokenizer.
        pooled: whether the event loop may tokenize beside vLLM's thread.
    """
    size = len(prompt.get("prompt", ""))
    return "multi_modal_data" in prompt or size > LONGEST_IN_LOOP or (size > 0 and not pooled)


async def tokenize(vllm: vllm_api.Vllm, llm: EngineClient, prompt: Mapping[str, Any], turns: Turns) -> Any:
    """Tokenize a prompt if this vLLM can (0.20 on), else return it as it is: `add_request` will do it.

    Args:
        vllm: the loaded vLLM.
        llm: the engine; its loop is the running one.
        prompt: as vLLM takes it.
        turns: says when a prompt may be tokenized and added in the loop.
    """
    renderer = vllm_api.renderer(vllm, llm)
    if renderer is None:
        await turns.take()
        return prompt
    tokenizer = vllm_api.pooled_tokenizer(vllm, renderer)
    if needs_thread(prompt, pooled=tokenizer is not None):
        if tokenizer is not None:
            await _refuse_long(tokenizer, prompt.get("prompt", ""), vllm_api.facts(llm).max_tokens, turns)
        (rendered,) = await renderer.render_cmpl_async([vllm_api.parse_prompt(vllm, llm, prompt)])
    else:
        await turns.take()
        (rendered,) = renderer.render_cmpl([vllm_api.parse_prompt(vllm, llm, prompt)])
    return rendered


async def _refuse_long(tokenizer: Any, text: str, most: int, turns: Turns) -> None:
    """Refuse a text that has far more tokens than the model takes, at the price of no more than it takes.

    A cut adds a token or two, so a text is given a quarter more. One piece of one text is counted at a time.
    """
    if len(text) <= most * USUAL_CHARACTERS or most <= 0:
        return
    count = 0
    for start in range(0, len(text), PIECE):
        async with turns.counting:
            count += len(await asyncio.to_thread(tokenizer.encode, text[start : start + PIECE], add_special_tokens=False))
        if count > most + most // 4 + 64:
            raise InvalidRequestError(f"the prompt has more than {count} tokens; this model's maximum is {most}")
