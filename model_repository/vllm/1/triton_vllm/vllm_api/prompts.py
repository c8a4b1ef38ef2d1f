"""Find the parts of each vLLM version that make prompts: renderers, tokenizers, chat templates, decoders of media."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from triton_vllm.base.protocols import EngineClient, Renderer
    from triton_vllm.vllm_api.parts import Vllm


def renderer(vllm: Vllm, llm: EngineClient) -> Renderer | None:
    """Return the renderer, which tokenizes prompts before they are added (0.20 on). If None, ``add_request`` tokenizes."""
    found: Renderer | None = getattr(llm, "renderer", None)
    if found is None or vllm.parse_model_prompt is None or not hasattr(found, "render_cmpl_async"):
        return None
    return found


def parse_prompt(vllm: Vllm, llm: EngineClient, prompt: Mapping[str, Any]) -> Any:
    """Return a prompt as the renderer takes it; only for a vLLM that has a renderer."""
    if vllm.parse_model_prompt is None:
        raise TypeError("this vLLM has no renderer")
    return vllm.parse_model_prompt(llm.model_config, prompt)


def pooled_tokenizer(vllm: Vllm, renderer: Renderer) -> Any | None:
    """Return the tokenizer if any thread may use it while vLLM does, else None.

    vLLM pools most tokenizers: each thread gets a copy. A tokenizer without a pool keeps the
    options of its last call, such as truncation. It fails ("Already borrowed") if another thread
    calls it with other options at the same time. A tokenizer written in Python is slow.
    """
    pooled = vllm.ThreadSafeHFTokenizerMixin
    tokenizer = getattr(renderer, "tokenizer", None)
    return tokenizer if pooled is not None and isinstance(tokenizer, pooled) else None


async def render_chat(
    vllm: Vllm, llm: EngineClient, messages: list[Any], template_kwargs: Mapping[str, Any]
) -> Any:
    """Return the prompt of a conversation, made with the model's chat template.

    Raises:
        Exception: the template's own exception about the messages.
    """
    options = {
        "add_generation_prompt": not template_kwargs.get("continue_final_message"),
        **template_kwargs,
    }
    found: Renderer | None = getattr(llm, "renderer", None)
    if found is not None and vllm.ChatParams is not None and hasattr(found, "render_chat_async"):
        params = vllm.ChatParams(chat_template_kwargs=options)
        _, (prompt,) = await found.render_chat_async(
            [messages], params
        )  # vLLM limits the template's time (0.32)
        return prompt
    tokenizer = llm.get_tokenizer()
    tokenizer = await tokenizer if inspect.isawaitable(tokenizer) else tokenizer
    text = tokenizer.apply_chat_template(messages, **{**options, "tokenize": False})
    # The template writes the special tokens itself, so the tokenizer must not add them.
    return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def media_loaders(vllm: Vllm, engine_args: Mapping[str, Any]) -> dict[str, Callable[[bytes], Any]]:
    """Return a decoder of file contents for each kind of media that this vLLM knows, configured by ``media_io_kwargs``."""
    options = engine_args.get("media_io_kwargs") or {}
    io = vllm.media_io
    made: dict[str, Any] = {}
    if io["image"] is not None:
        made["image"] = io["image"](**options.get("image", {}))
    if io["audio"] is not None:
        made["audio"] = io["audio"](**options.get("audio", {}))
    if io["video"] is not None and "image" in made:
        made["video"] = io["video"](made["image"], **options.get("video", {}))
    return {name: item.load_bytes for name, item in made.items()}
