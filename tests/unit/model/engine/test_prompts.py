"""A request becomes the prompt that vLLM takes; vLLM is replaced by a small stand-in, the event loop is real."""

from __future__ import annotations

import asyncio
import base64
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from support.patience import pause
from triton_vllm import vllm_api
from triton_vllm.base.errors import InvalidRequestError, UnsupportedError
from triton_vllm.chat.request import Chat
from triton_vllm.engine.order import Prompt
from triton_vllm.engine.prompts import DECODED_AT_ONCE, Prompter

OLD: Any = SimpleNamespace(parse_model_prompt=None, ChatParams=None, ThreadSafeHFTokenizerMixin=None)


NEW_ENGINE: Any = SimpleNamespace()


def unmeasured(media):
    """Let every file pass."""


def made(request, *, vllm=OLD, llm=None, loaders=None, check=unmeasured):
    prompt, _ = asyncio.run(Prompter(vllm, loaders or {}, check).make(llm or SimpleNamespace(), request, None))
    return prompt


def test_a_few_requests_are_decoded_at_once():
    """Each holds its pixels three times meanwhile."""
    running, most = [], []

    def load(data):
        running.append(data)
        most.append(len(running))
        pause(0.02)  # lets others in, if others are let in
        running.remove(data)

    async def all_at_once():
        prompter = Prompter(OLD, {"image": load}, unmeasured)
        requests = [Prompt(text="hi", media={"image": (base64.b64encode(bytes([n])).decode(),)}) for n in range(12)]
        await asyncio.gather(*(prompter.make(SimpleNamespace(), request, None) for request in requests))

    asyncio.run(all_at_once())
    assert len(most) == 12
    assert max(most) <= DECODED_AT_ONCE


class Tokenizer:
    """In place of one from transformers."""

    def apply_chat_template(self, messages, **options):
        if messages[0]["role"] == "alien":
            raise ValueError("roles must alternate\nat line 3 of the template")
        return f"{messages} {options}"

    def encode(self, text, add_special_tokens):
        return [text, add_special_tokens]


def conversation(role="user", **given):
    return Prompt(chat=Chat(({"role": role, "content": "hi"},), **given))


def talk(*parts):
    return Prompt(chat=Chat(({"role": "user", "content": list(parts)},), media=True))


class Renders:
    """In place of vLLM's renderer, which decodes what stands in messages."""

    def __init__(self, error=None):
        self.asked, self.error = 0, error

    async def render_chat_async(self, conversations, params):
        self.asked += 1
        if self.error:
            raise self.error
        return None, ["prompt"]


NEW = SimpleNamespace(**{**vars(OLD), "ChatParams": lambda **given: given})


def test_videos_in_messages_are_checked_in_a_thread_before_vllm_sees_them():
    """Only those that stand there: what vLLM fetches is not at hand."""
    seen, renderer = [], Renders()

    def check(videos):
        seen.append((threading.current_thread(), list(videos)))
        if videos:
            raise InvalidRequestError(f"{videos[0][0]} is long")

    given = {"video_url": {"url": "data:video/mp4;base64," + base64.b64encode(b"film").decode()}}
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content\[1\].video_url is long"):
        made(talk("look", given), vllm=NEW, llm=SimpleNamespace(renderer=renderer), check=check)
    assert renderer.asked == 0
    assert (
        made(talk({"video_url": "https://a.example/b"}), vllm=NEW, llm=SimpleNamespace(renderer=renderer), check=check)
        == "prompt"
    )
    assert [videos for _, videos in seen] == [[("messages[0].content[1].video_url", b"film")]]
    assert threading.main_thread() not in [thread for thread, _ in seen]


def test_an_audio_in_messages_that_is_too_long_is_the_clients_error():
    """With vLLM's number and limit, without its advice to the operator, and not as a fault of the template."""
    error = ValueError("Audio exceeds maximum allowed duration of 600s (9.0s). Set VLLM_X_S to increase this limit.")
    with pytest.raises(InvalidRequestError) as caught:
        made(talk("listen"), vllm=NEW, llm=SimpleNamespace(renderer=Renders(error)))
    assert str(caught.value) == "messages hold what cannot be decoded: Audio exceeds maximum allowed duration of 600s (9.0s)"


def test_what_has_no_decoder_is_not_a_fault_of_the_template():
    """As with vLLM's placeholder of a package that is not there."""
    renderer = Renders(ImportError("Please install vllm[audio]"))
    with pytest.raises(UnsupportedError, match="the model's environment has no decoder for it"):
        made(talk("listen"), vllm=NEW, llm=SimpleNamespace(renderer=renderer))


def test_a_template_that_refuses_the_messages_is_the_clients_error():
    """Its first line says what is wrong; the rest are internals."""
    llm = SimpleNamespace(get_tokenizer=Tokenizer)
    with pytest.raises(InvalidRequestError, match=r"chat template: roles must alternate$"):
        made(conversation(role="alien"), llm=llm)


def test_an_engine_without_a_renderer_of_pairs_does_not_use_that_of_another(monkeypatch):
    """Its renderer cannot be made; a second attempt must not take the one of the engine before."""

    def renderer(llm, template):
        if llm is NEW_ENGINE:
            raise ImportError("no renderer")
        return render

    async def render(text, second, params):
        return f"{text}+{second}", params

    monkeypatch.setattr(vllm_api, "pair_renderer", renderer)
    prompter = Prompter(OLD, {}, unmeasured)
    old: Any = SimpleNamespace()
    pair = Prompt("a", second="b")
    assert asyncio.run(prompter.make(old, pair, None)) == ("a+b", None)
    for _ in range(2):
        with pytest.raises(ImportError, match="no renderer"):
            asyncio.run(prompter.make(NEW_ENGINE, pair, None))


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_first_request_would_wait_for_is_done_ahead(monkeypatch, fails):
    """A token is sampled; a model that refuses it is served all the same."""
    done = []

    async def sample_once(vllm, llm):
        done.append(("sampled", vllm, llm))
        if fails:
            raise ValueError("an encoder is needed")

    monkeypatch.setattr(vllm_api, "sample_once", sample_once)

    llm: Any = "llm"
    asyncio.run(Prompter(OLD, {}, unmeasured).start(llm))
    assert done == []
    asyncio.run(Prompter(OLD, {}, unmeasured, samples_ahead=True).start(llm))
    assert done == [("sampled", OLD, "llm")]
