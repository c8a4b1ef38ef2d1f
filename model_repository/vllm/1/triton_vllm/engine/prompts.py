"""Make vLLM's prompts from requests."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.errors import AdapterError, InvalidRequestError, UnsupportedError
from triton_vllm.constraints.trials import Trials
from triton_vllm.engine.tokenizing import may_be_long, refuse_long, tokenize
from triton_vllm.engine.turns import Turns
from triton_vllm.media import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from triton_vllm.base.protocols import EngineClient
    from triton_vllm.chat.request import Chat
    from triton_vllm.constraints.checks import Constraint
    from triton_vllm.engine.order import Prompt

_log = logging.getLogger(__name__)
# Decoding a picture may take three times the bytes of its pixels.
DECODED_AT_ONCE = 4
"""The most requests whose pictures are decoded at the same time."""


class Prompter:
    """Turns requests into prompts of the installed vLLM.

    Args:
        vllm: the loaded vLLM.
        loaders: decoders of media by kind.
        check: refuses videos that cost too much to decode.
        chat_template: the template of conversations. None means the model's own.
        samples_ahead: whether to sample a token while the model is loaded. The first request then
            need not wait.
    """

    def __init__(
        self,
        vllm: vllm_api.Vllm,
        loaders: Mapping[str, Callable[[bytes], Any]],
        check: decode.CheckVideos,
        *,
        chat_template: str | None = None,
        samples_ahead: bool = False,
    ) -> None:
        self._vllm = vllm
        self._loaders = loaders
        self._check = check
        self._chat_template = chat_template
        self._turns = Turns()
        self._trials = Trials()
        # The engine for which ``_render_pair`` was made, and that function of vLLM, if it has one.
        self._pairs_of: EngineClient | None = None
        self._render_pair: vllm_api.RenderPair | None = None
        self._samples_ahead = samples_ahead
        self._decoding = asyncio.Semaphore(DECODED_AT_ONCE)
        # For the headers of videos in messages: one request at a time.
        self._reading = asyncio.Lock()

    async def start(self, llm: EngineClient) -> None:
        """Do now what the first requests would wait for; never raises.

        This runs in the engine's event loop.
        """
        if not self._samples_ahead:
            return
        try:
            await vllm_api.sample_once(self._vllm, llm)
        except Exception:  # noqa: BLE001
            # For example, the model takes no such prompt. Its first request then waits.
            _log.info("Nothing could be sampled ahead", exc_info=True)

    async def make(self, llm: EngineClient, prompt: Prompt, params: Any) -> tuple[Any, Any]:
        """Return the prompt for ``add_request``, and its parameters.

        This runs in the engine's event loop.

        Raises:
            AdapterError: the media cannot be decoded, the chat template refuses the messages, the
                constraint costs too much, or this vLLM does not join pairs.
        """
        if prompt.second is not None:
            return await self._make_pair(llm, prompt, params)
        if prompt.constraint is not None:
            await self._trials.check(llm, prompt.constraint)
        made = await self._make_single(llm, prompt)
        # vLLM reads the salt next to the tokens, whichever way they were made.
        if prompt.cache_salt is not None:
            made["cache_salt"] = prompt.cache_salt
        return made, params

    async def _make_single(self, llm: EngineClient, prompt: Prompt) -> Any:
        """Return the prompt for one text, list of token ids or conversation, with its media."""
        if prompt.chat is not None:
            return await self._render_chat(llm, prompt.chat)
        raw: dict[str, Any] = {"prompt": prompt.text}
        if prompt.token_ids is not None:
            raw = {"prompt_token_ids": list(prompt.token_ids)}
        if prompt.media:
            # Decoding an image or a video takes long, so a thread does it, not the event loop.
            async with self._decoding:
                raw["multi_modal_data"] = await asyncio.to_thread(
                    decode.decode, prompt.media, self._loaders, self._check
                )
        return await tokenize(self._vllm, llm, raw, self._turns)

    async def take_turn(self) -> None:
        """Wait until the event loop may add a request of another API to vLLM."""
        await self._turns.take()

    async def try_constraint(self, llm: EngineClient, constraint: Constraint) -> None:
        """Return if vLLM may compile a constraint.

        Raises:
            AdapterError: it costs too much, or is wrong.
        """
        await self._trials.check(llm, constraint)

    async def check_text(self, llm: EngineClient, text: str, most: int) -> None:
        """Return if a text may be tokenized as a whole.

        Args:
            llm: the engine.
            text: the text.
            most: tokens that the model takes. 0 means unknown.

        Raises:
            InvalidRequestError: it has far more tokens.
        """
        # Nearly all texts are short. Asking vLLM for its tokenizer takes longer than this.
        if not may_be_long(text, most):
            return
        renderer = vllm_api.renderer(self._vllm, llm)
        tokenizer = renderer and vllm_api.pooled_tokenizer(self._vllm, renderer)
        # Without one that another thread may use, only vLLM can count the tokens.
        if tokenizer is not None:
            await refuse_long(tokenizer, text, most, self._turns)

    async def check_videos(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Return if the videos in messages may be decoded.

        Raises:
            AdapterError: a video is too long or too large, or is no video.
        """
        videos = decode.videos_within(messages)
        if videos:
            async with self._reading:
                await asyncio.to_thread(decode.check_within, videos, self._check)

    async def _make_pair(self, llm: EngineClient, prompt: Prompt, params: Any) -> tuple[Any, Any]:
        """Return the prompt and the parameters for two texts that a cross-encoder reads."""
        # One renderer for each engine: an engine that was started again has its own.
        if llm is not self._pairs_of:
            self._render_pair = vllm_api.pair_renderer(llm, self._chat_template)
            self._pairs_of = llm
        if self._render_pair is None:
            raise UnsupportedError(
                "this vLLM does not read pairs of texts for the adapter; "
                "send them to an embedding model"
            )
        return await self._render_pair(prompt.text, prompt.second, params)

    async def _render_chat(self, llm: EngineClient, chat: Chat) -> Any:
        """Return the prompt for a conversation.

        Raises:
            UnsupportedError: its media need a decoder that is not installed.
            InvalidRequestError: the chat template refuses the messages, or a file of them decodes
                to too much.
        """
        kwargs = dict(chat.template_kwargs)
        if chat.tools:
            kwargs["tools"] = [dict(tool) for tool in chat.tools]
        if chat.media:
            await self.check_videos(chat.messages)
        messages = [dict(message) for message in chat.messages]
        try:
            return await vllm_api.render_chat(
                self._vllm, llm, messages, kwargs, self._chat_template
            )
        except AdapterError:
            raise
        except ImportError as error:
            # vLLM would use a decoder that is not installed.
            text = f"messages hold what cannot be decoded: {decode.NO_DECODER}"
            raise UnsupportedError(text) from error
        except Exception as error:
            # A template is the model's own program and may raise anything.
            refusal = vllm_api.too_large(error)
            if refusal:
                text = f"messages hold what cannot be decoded: {refusal}"
            else:
                reason = str(error).strip().partition("\n")[0]
                text = f"messages cannot be rendered by the chat template: {reason}"
            raise InvalidRequestError(text) from error
