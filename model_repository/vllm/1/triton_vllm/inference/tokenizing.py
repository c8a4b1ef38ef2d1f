"""Decide which prompts are tokenized in the event loop, and when.

Tokenizing a short prompt costs less than handing it to another thread. Tokenizing a long one in the loop delays the outputs
of all other requests.
"""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING, Any

from triton_vllm import compat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.protocols import EngineClient

SHORT_TEXT = 4096
"""Characters of a prompt that are tokenized in the event loop at once, about 1 ms. Another thread costs two hand-overs of
Python's lock for each request: with 256 arriving at once, a fifth of all that was spent on taking them in."""
MEDIUM_TEXT = 16384
"""Characters of a prompt that are tokenized in the event loop, about 5 ms for English, one prompt between two looks at
the engine's outputs."""


class Place(enum.Enum):
    """Where a prompt is tokenized."""

    LOOP = "in the event loop, at once"
    TURN = "in the event loop, one prompt in a round"
    THREAD = "in a thread of vLLM's"


def place(prompt: Mapping[str, Any], *, pooled: bool) -> Place:
    """Return where a prompt is tokenized.

    Args:
        prompt: as vLLM takes it; token ids need no tokenizer.
        pooled: whether the event loop may tokenize beside vLLM's thread.
    """
    size = len(prompt.get("prompt", ""))
    if "multi_modal_data" in prompt or size > MEDIUM_TEXT or (size and not pooled):
        return Place.THREAD
    return Place.TURN if size > SHORT_TEXT else Place.LOOP


async def tokenize(vllm: compat.Vllm, llm: EngineClient, prompt: Mapping[str, Any], turn: asyncio.Lock) -> Any:
    """Tokenize a prompt if this vLLM can (0.20 on), else return it as it is: `add_request` will do it.

    Args:
        vllm: the loaded vLLM.
        llm: the engine; its loop is the running one.
        prompt: as vLLM takes it.
        turn: held by the prompt that is tokenized in this round of the loop.
    """
    renderer = compat.renderer(vllm, llm)
    if renderer is None:
        return prompt
    parsed = compat.parse_prompt(vllm, llm, prompt)
    where = place(prompt, pooled=compat.has_pooled_tokenizer(vllm, renderer))
    if where is Place.THREAD:
        (rendered,) = await renderer.render_cmpl_async([parsed])
    elif where is Place.TURN:
        async with turn:
            await asyncio.sleep(0)  # lets others queue for the lock, and the loop see to outputs
            (rendered,) = renderer.render_cmpl([parsed])
    else:
        (rendered,) = renderer.render_cmpl([parsed])
    return rendered
