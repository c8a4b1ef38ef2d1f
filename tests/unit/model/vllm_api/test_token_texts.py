"""The text of a token is decoded once, however many log probabilities it has."""

from __future__ import annotations

import gc
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import pytest

from triton_vllm import vllm_api
from triton_vllm.vllm_api.token_texts import TokenTexts, keep_token_texts

_MODULE = "vllm.v1.engine.logprobs"


class Tokenizer:
    """Notes what it decodes."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.decoded: list[int] = []

    def texts(self, token_ids: list[int]) -> list[str]:
        """Return a new text for each token."""
        self.decoded += token_ids
        return [f"{self.prefix}{token}" for token in token_ids]


@pytest.fixture
def texts() -> TokenTexts:
    """Texts, decoded by the tokenizers above."""
    return TokenTexts(Tokenizer.texts)


def test_each_token_is_decoded_once_and_has_one_text(texts):
    """vLLM would hold a text for each value of each output."""
    tokenizer = Tokenizer()
    first = texts(tokenizer, [7, 1000, 7])
    second = texts(tokenizer, [1000, 8, 7])
    assert (first, second) == (["7", "1000", "7"], ["1000", "8", "7"])
    assert first[1] is second[0]
    assert sorted({*tokenizer.decoded}) == [7, 8, 1000]
    assert tokenizer.decoded.count(1000) == 1


def test_vllm_may_change_the_list(texts):
    """It does so for tokens that are a part of a character."""
    tokenizer = Tokenizer()
    texts(tokenizer, [1, 2])[0] = "corrected"
    assert texts(tokenizer, [1, 2]) == ["1", "2"]


def test_each_tokenizer_has_its_own_texts_while_it_lives(texts):
    """An adapter may bring one."""
    own, other = Tokenizer("own "), Tokenizer("other ")
    assert [texts(own, [1]), texts(other, [1])] == [["own 1"], ["other 1"]]
    gone = ref(other)
    del other
    gc.collect()
    assert gone() is None


def test_a_tokenizer_without_a_hash_is_asked_each_time(texts):
    """A model may bring its own class, and an error would end the engine."""

    class Unhashable(Tokenizer):
        __hash__ = None  # type: ignore[assignment]

    tokenizer = Unhashable()
    assert [texts(tokenizer, [1]), texts(tokenizer, [1])] == [["1"], ["1"]]
    assert tokenizer.decoded == [1, 1]


def test_vllms_function_is_replaced_once(monkeypatch):
    """Every start of an engine asks for it; a model can be loaded more than once in one process."""
    module: Any = ModuleType(_MODULE)
    module.convert_ids_list_to_tokens = Tokenizer.texts
    monkeypatch.setitem(sys.modules, _MODULE, module)
    vllm: Any = SimpleNamespace(
        AsyncEngineArgs=dict,
        AsyncLLM=SimpleNamespace(from_engine_args=lambda *_, **__: None),
        UsageContext=SimpleNamespace(API_SERVER=None),
        disable_envs_cache=None,
        enable_envs_cache=None,
    )
    vllm_api.start(vllm, {})
    kept = module.convert_ids_list_to_tokens
    keep_token_texts()
    assert module.convert_ids_list_to_tokens is kept
    assert kept(Tokenizer(), [5]) == ["5"]


def test_a_vllm_without_the_function_is_left_as_it_is(monkeypatch):
    """It decodes in a way of its own."""
    module = ModuleType(_MODULE)
    monkeypatch.setitem(sys.modules, _MODULE, module)
    keep_token_texts()
    assert not hasattr(module, "convert_ids_list_to_tokens")
