"""Make vLLM's prompts from requests."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.errors import AdapterError, InvalidRequestError, UnsupportedError
from triton_vllm.call import GenerateRequest
from triton_vllm.chat.request import Chat
from triton_vllm.constraints.trials import Trials
from triton_vllm.engine.tokenizing import tokenize
from triton_vllm.engine.turns import Turns
from triton_vllm.media import decode
from triton_vllm.pooling.embedding import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from triton_vllm.base.protocols import EngineClient

_log = logging.getLogger(__name__)
DECODED_AT_ONCE = 4
"""The most requests whose pictures are decoded at the same time: each may take three times the bytes of its pixels."""


class Prompter:
    """Turns requests into prompts of the installed vLLM.

    Args:
        vllm: the loaded vLLM.
        loaders: decoders of media by kind.
        check: refuses videos that cost too much to decode.
        samples_ahead: whether to sample a token while the model is loaded. The first request then
            need not wait.
    """

    def __init__(
        self,
        vllm: vllm_api.Vllm,
        loaders: Mapping[str, Callable[[bytes], Any]],
        check: decode.CheckVideos,
        *,
        samples_ahead: bool = False,
    ) -> None:
        self._vllm = vllm
        self._loaders = loaders
        self._check = check
        self._turns = Turns()
        self._trials = Trials()
        self._pairs: tuple[EngineClient, vllm_api.RenderPair | None] | None = None
        self._samples_ahead = samples_ahead
        self._decoding = asyncio.Semaphore(DECODED_AT_ONCE)
        self._reading = (
            asyncio.Lock()
        )  # for the headers of videos in messages: one request at a time

    async def start(self, llm: EngineClient) -> None:
        """Do now what the first requests would wait for; runs in the engine's event loop and never raises."""
        if not self._samples_ahead:
            return
        try:
            await vllm_api.sample_once(self._vllm, llm)
        except Exception:  # noqa: BLE001 - e.g. the model takes no such prompt; its first request then waits
            _log.info("Nothing could be sampled ahead", exc_info=True)

    async def make(self, llm: EngineClient, request: GenerateRequest | Part) -> Any:
        """Return the prompt for ``add_request``; runs in the engine's event loop.

        Raises:
            AdapterError: the media cannot be decoded, the chat template refuses the messages, or
                the constraint costs too much.
        """
        if isinstance(request, GenerateRequest):
            if request.constraint is not None:
                await self._trials.check(llm, request.constraint)
            prompt = await self._prompt(llm, request)
            if request.cache_salt is not None:
                prompt["cache_salt"] = (
                    request.cache_salt
                )  # vLLM reads it next to the tokens, whichever way they were made
            return prompt
        return await tokenize(self._vllm, llm, _as_vllm(request), self._turns)

    async def _prompt(self, llm: EngineClient, request: GenerateRequest) -> Any:
        if request.chat is not None:
            return await self._chat(llm, request.chat)
        prompt = _as_vllm(request)
        if request.media:
            # Decoding an image or a video takes long, so a thread does it, not the event loop.
            async with self._decoding:
                prompt["multi_modal_data"] = await asyncio.to_thread(
                    decode.decode, request.media, self._loaders, self._check
                )
        return await tokenize(self._vllm, llm, prompt, self._turns)

    async def make_pair(self, llm: EngineClient, part: Part, params: Any) -> tuple[Any, Any]:
        """Return the prompt and its own parameters for two texts that a cross-encoder reads together.

        Raises:
            AdapterError: this vLLM does not join pairs.
        """
        if self._pairs is None or self._pairs[0] is not llm:
            self._pairs = llm, vllm_api.pair_renderer(llm)
        if self._pairs[1] is None:
            raise UnsupportedError(
                "this vLLM does not read pairs of texts for the adapter; send them to an embedding model"
            )
        return await self._pairs[1](part.text, part.second, params)

    async def _chat(self, llm: EngineClient, chat: Chat) -> Any:
        kwargs = dict(chat.template_kwargs)
        if chat.tools:
            kwargs["tools"] = [dict(tool) for tool in chat.tools]
        videos = decode.videos_within(chat.messages) if chat.media else ()
        if videos:
            async with self._reading:
                await asyncio.to_thread(decode.check_within, videos, self._check)
        try:
            return await vllm_api.render_chat(
                self._vllm, llm, [dict(m) for m in chat.messages], kwargs
            )
        except AdapterError:
            raise
        except ImportError as error:  # raised where vLLM would use a decoder that is not installed
            raise UnsupportedError(
                f"messages hold what cannot be decoded: {decode.NO_DECODER}"
            ) from error
        except Exception as error:  # a template is the model's own program and may raise anything
            refusal = vllm_api.too_large(error)
            if refusal:
                raise InvalidRequestError(
                    f"messages hold what cannot be decoded: {refusal}"
                ) from error
            text = str(error).strip().split("\n", 1)[0]
            raise InvalidRequestError(
                f"messages cannot be rendered by the model's chat template: {text}"
            ) from error


def _as_vllm(request: GenerateRequest | Part) -> dict[str, Any]:
    if request.token_ids is not None:
        return {"prompt_token_ids": list(request.token_ids)}
    return {"prompt": request.text}
