"""Find the parts of vLLM that make prompts: renderer, tokenizer, chat template, media decoders."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from triton_vllm.base.protocols import EngineClient, Renderer
    from triton_vllm.vllm_api.names import Vllm


def renderer(vllm: Vllm, llm: EngineClient) -> Renderer | None:
    """Return vLLM's renderer, which tokenizes prompts before they are added (since 0.20).

    If None, ``add_request`` tokenizes.
    """
    found: Renderer | None = getattr(llm, "renderer", None)
    if vllm.parse_model_prompt is None or not hasattr(found, "render_cmpl_async"):
        return None
    return found


def parse_prompt(vllm: Vllm, llm: EngineClient, prompt: Mapping[str, Any]) -> Any:
    """Return a prompt as the renderer takes it; only for a vLLM that has a renderer."""
    return vllm.parse_model_prompt(llm.model_config, prompt)


def pooled_tokenizer(vllm: Vllm, renderer: Renderer) -> Any | None:
    """Return the tokenizer if any thread may use it while vLLM does, else None."""
    # vLLM pools most tokenizers: each thread gets a copy. A tokenizer without a pool keeps the
    # options of its last call, such as truncation. It fails ("Already borrowed") if another thread
    # calls it with other options at the same time. A tokenizer written in Python has no pool
    # either, and is slow.
    pooled_class = vllm.ThreadSafeHFTokenizerMixin
    tokenizer = getattr(renderer, "tokenizer", None)
    is_pooled = pooled_class is not None and isinstance(tokenizer, pooled_class)
    return tokenizer if is_pooled else None


async def tokenizer_of(llm: EngineClient) -> Any:
    """Return the engine's tokenizer."""
    tokenizer = llm.get_tokenizer()
    # Before 0.20 it must be awaited.
    return await tokenizer if inspect.isawaitable(tokenizer) else tokenizer


async def has_tekken(llm: EngineClient) -> bool:
    """Return whether the engine has Mistral's newer tokenizer; vLLM treats its grammars apart."""
    return bool(getattr(await tokenizer_of(llm), "is_tekken", False))


async def render_chat(
    vllm: Vllm,
    llm: EngineClient,
    messages: list[Any],
    template_kwargs: Mapping[str, Any],
    template: str | None = None,
) -> Any:
    """Return the prompt of a conversation, made with a chat template.

    Args:
        vllm: the loaded vLLM.
        llm: the engine.
        messages: the conversation.
        template_kwargs: further arguments of the template.
        template: the template. None means the model's own.

    Raises:
        Exception: the template's own exception about the messages.
    """
    # The template begins the answer, unless the answer continues the last message.
    options = {
        "add_generation_prompt": not template_kwargs.get("continue_final_message"),
        **template_kwargs,
    }
    found: Any = getattr(llm, "renderer", None)
    if vllm.ChatParams is not None and hasattr(found, "render_chat_async"):
        params = vllm.ChatParams(chat_template=template, chat_template_kwargs=options)
        # vLLM 0.32 limits the template's time here.
        _, (prompt,) = await found.render_chat_async([messages], params)
        return prompt
    # Before vLLM 0.20, only the tokenizer has the template.
    tokenizer = await tokenizer_of(llm)
    if template is not None:
        options["chat_template"] = template
    text = tokenizer.apply_chat_template(messages, **{**options, "tokenize": False})
    # The template writes the special tokens itself, so the tokenizer must not add them.
    return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def media_loaders(vllm: Vllm, engine_args: Mapping[str, Any]) -> dict[str, Callable[[bytes], Any]]:
    """Return a decoder of file contents for each kind of media that this vLLM knows."""
    options = engine_args.get("media_io_kwargs") or {}
    classes = vllm.media_io
    decoders: dict[str, Any] = {}
    for name in ("image", "audio"):
        if classes[name] is not None:
            decoders[name] = classes[name](**options.get(name, {}))
    # The decoder of videos decodes their pictures with that of images.
    if classes["video"] is not None and "image" in decoders:
        decoders["video"] = classes["video"](decoders["image"], **options.get("video", {}))
    return {name: decoder.load_bytes for name, decoder in decoders.items()}
