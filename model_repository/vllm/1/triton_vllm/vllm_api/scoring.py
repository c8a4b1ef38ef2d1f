"""Find out what a model can score, and join two texts for a cross-encoder like vLLM's server."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triton_vllm.base.protocols import EngineClient

RenderPair = Callable[[Any, Any, Any], Awaitable[tuple[Any, Any]]]
"""Takes two texts and PoolingParams. Returns a prompt and its own PoolingParams."""
_SCORING_PACKAGE = "vllm.entrypoints.pooling.scoring"
_TEMPLATE_MODULES = ("vllm.renderers.chat_utils", "vllm.entrypoints.chat_utils")  # 0.32, 0.28


def scoring_task(llm: EngineClient, tasks: Sequence[str]) -> str:
    """Return the pooling task with which a model scores pairs; empty if it cannot."""
    hf_config = getattr(llm.model_config, "hf_config", None)
    # A cross-encoder classifies with one label: its only number is the score of a pair. The vectors
    # that an embedding model returns for both texts are compared.
    if "classify" in tasks and getattr(hf_config, "num_labels", 0) == 1:
        return "classify"
    return "embed" if "embed" in tasks else ""


def pair_renderer(llm: EngineClient, template: str | None = None) -> RenderPair | None:
    """Return a function that makes a prompt and its parameters from two texts.

    Return None if this vLLM has no class for that, or another one than we know.

    Args:
        llm: the engine.
        template: the chat template. None means the model's own.
    """
    try:
        protocol = importlib.import_module(f"{_SCORING_PACKAGE}.protocol")
        # Only its tokenization parameters are used, which do not depend on the texts.
        request = protocol.ScoreTextRequest(text_1="a", text_2="a")
        processors = importlib.import_module(f"{_SCORING_PACKAGE}.io_processor").ScoringIOProcessors
        processor = processors["cross-encoder"](
            vllm_config=getattr(llm, "vllm_config", None),
            renderer=getattr(llm, "renderer", None),
            chat_template_config=_template_config(template),
        )
        render_pairs = processor.render_async
        # The arguments that are the same for all pairs.
        fixed = {
            "chat_template": template,
            "max_tokens_per_query": 0,
            "max_tokens_per_doc": 0,
            "tok_params": request.build_tok_params(llm.model_config),
            "prompt_extras": None,
            "skip_mm_cache": False,
            "lora_requests": None,
            "priorities": 0,
        }
    except (ImportError, AttributeError, KeyError, TypeError):
        # This vLLM may join texts in another way, which we have not tried.
        return None

    async def render(first: Any, second: Any, params: Any) -> tuple[Any, Any]:
        pair = {"data_1": first, "data_2": second, "params": params}
        rendered = await render_pairs({**fixed, **pair})
        return rendered["prompts"], rendered["params"]

    return render


def _template_config(template: str | None) -> Any:
    for place in _TEMPLATE_MODULES:
        try:
            return importlib.import_module(place).ChatTemplateConfig(chat_template=template)
        except (ImportError, AttributeError):
            continue
    raise ImportError("no ChatTemplateConfig")
