"""Decide where prompts are tokenized, and when.

Tokenizing a short prompt costs less than handing it to another thread. Tokenizing a long one in the loop, or many short ones
at once, delays the outputs of all other requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_vllm import compat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.inference.turns import Turns
    from triton_vllm.protocols import EngineClient

LONGEST_IN_LOOP = 16384
"""Characters of a prompt that are tokenized in the event loop, about 5 ms for English. Another thread costs two hand-overs of
Python's lock for each request: with 256 arriving at once, a fifth of all that was spent on taking them in."""


def needs_thread(prompt: Mapping[str, Any], *, pooled: bool) -> bool:
    """Return whether a prompt is tokenized in a thread of vLLM's.

    Args:
        prompt: as vLLM takes it; token ids need no tokenizer.
        pooled: whether the event loop may tokenize beside vLLM's thread.
    """
    size = len(prompt.get("prompt", ""))
    return "multi_modal_data" in prompt or size > LONGEST_IN_LOOP or (size > 0 and not pooled)


async def tokenize(vllm: compat.Vllm, llm: EngineClient, prompt: Mapping[str, Any], turns: Turns) -> Any:
    """Tokenize a prompt if this vLLM can (0.20 on), else return it as it is: `add_request` will do it.

    Args:
        vllm: the loaded vLLM.
        llm: the engine; its loop is the running one.
        prompt: as vLLM takes it.
        turns: says when a prompt may be tokenized and added in the loop.
    """
    renderer = compat.renderer(vllm, llm)
    if renderer is None:
        await turns.take()
        return prompt
    if needs_thread(prompt, pooled=compat.has_pooled_tokenizer(vllm, renderer)):
        (rendered,) = await renderer.render_cmpl_async([compat.parse_prompt(vllm, llm, prompt)])
    else:
        await turns.take()
        (rendered,) = renderer.render_cmpl([compat.parse_prompt(vllm, llm, prompt)])
    return rendered
