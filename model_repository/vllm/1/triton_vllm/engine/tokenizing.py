"""Decide where and when prompts are tokenized.

Tokenizing a short prompt costs less than handing it to another thread. Tokenizing a long prompt in
the loop, or many short ones at once, delays the outputs of all other requests.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import context_length

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.base.protocols import EngineClient
    from triton_vllm.engine.turns import Turns

# That takes about 5 ms for English. Another thread costs two hand-overs of Python's lock for each
# request. With 256 requests arriving at once, that was a fifth of the whole cost of taking them in.
LONGEST_IN_LOOP = 16384
"""The longest prompt, in characters, that is tokenized in the event loop."""
# A longer text seldom fits, so its tokens are counted before vLLM's one thread gets it.
USUAL_CHARACTERS = 8
"""Characters for each token of the model's length."""
# This takes about 50 ms.
PIECE = 65_536
"""Characters that are counted at once."""


def needs_thread(prompt: Mapping[str, Any], *, pooled: bool) -> bool:
    """Return whether a prompt is tokenized in one of vLLM's threads.

    Args:
        prompt: as vLLM takes it. Token ids need no tokenizer.
        pooled: whether the event loop may tokenize while vLLM's thread does.
    """
    size = len(prompt.get("prompt", ""))
    return "multi_modal_data" in prompt or size > LONGEST_IN_LOOP or (size > 0 and not pooled)


async def tokenize(
    vllm: vllm_api.Vllm, llm: EngineClient, prompt: Mapping[str, Any], turns: Turns
) -> Any:
    """Return the tokenized prompt, or the prompt unchanged if vLLM tokenizes it in ``add_request``.

    Args:
        vllm: the loaded vLLM.
        llm: the engine. Its loop is the running one.
        prompt: as vLLM takes it.
        turns: decides when a prompt may be tokenized and added in the loop.

    Raises:
        InvalidRequestError: a text has far more tokens than the model takes.
        Exception: vLLM's own exception.
    """
    renderer = vllm_api.renderer(vllm, llm)
    # Before 0.20, vLLM has no renderer. It tokenizes in ``add_request``, in this loop.
    if renderer is None:
        await turns.take()
        return prompt
    tokenizer = vllm_api.pooled_tokenizer(vllm, renderer)
    if needs_thread(prompt, pooled=tokenizer is not None):
        # Without a tokenizer that another thread may use, vLLM's thread tokenizes the whole text.
        if tokenizer is not None:
            most = vllm_api.facts(llm).max_tokens
            await refuse_long(tokenizer, prompt.get("prompt", ""), most, turns)
        (rendered,) = await renderer.render_cmpl_async([vllm_api.parse_prompt(vllm, llm, prompt)])
    else:
        await turns.take()
        (rendered,) = renderer.render_cmpl([vllm_api.parse_prompt(vllm, llm, prompt)])
    return rendered


def may_be_long(text: str, most: int) -> bool:
    """Return whether a text may have far more tokens than the model takes; 0 means unknown."""
    return 0 < most * USUAL_CHARACTERS < len(text)


async def refuse_long(tokenizer: Any, text: str, most: int, turns: Turns) -> None:
    """Refuse a text with far more tokens than the model takes, without counting all of them.

    Args:
        tokenizer: the tokenizer; any thread may use it.
        text: the text.
        most: tokens that the model takes. 0 means unknown.
        turns: lets one thread count at a time.

    Raises:
        InvalidRequestError: the text has far more tokens.
    """
    if not may_be_long(text, most):
        return
    count = 0
    for start in range(0, len(text), PIECE):
        piece = text[start : start + PIECE]
        # By turns: a second long text need not wait until the first is counted.
        async with turns.counting:
            tokens = await asyncio.to_thread(tokenizer.encode, piece, add_special_tokens=False)
        count += len(tokens)
        # Each cut between pieces may add a token or two, so the limit is a quarter higher.
        if count > most + most // 4 + 64:
            raise InvalidRequestError(
                f"the prompt has at least {count} tokens; {context_length(most)}"
            )
