"""The text of a token is decoded once, and numbers are kept in arrays."""

from __future__ import annotations

import gc
import sys
from array import array
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import pytest

from triton_vllm import vllm_api
from triton_vllm.vllm_api.log_probabilities import InArrays, TokenTexts, keep_small

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


def test_all_texts_are_forgotten(texts):
    """Those that were decoded during many requests would keep the memory around them in use."""
    tokenizer = Tokenizer()
    texts(tokenizer, [1])
    texts.forget()
    assert texts(tokenizer, [1]) == ["1"]
    assert tokenizer.decoded == [1, 1]


def test_flat_numbers_are_kept_in_arrays():
    """An object for each number takes four times as much; arrays give the same numbers back."""
    kept = InArrays(lambda _: SimpleNamespace(decoded_tokens=[]))(True)
    kept.token_ids.extend([0, 250_000])
    kept.logprobs.append(float("-inf"))
    kept.logprobs.append(-0.1)
    assert [kept.start_indices[:], kept.end_indices[:]] == [array("q"), array("q")]
    assert (kept.token_ids[1:], list(kept.logprobs)) == (array("q", [250_000]), [float("-inf"), -0.1])
    assert kept.decoded_tokens == []
    assert InArrays(lambda flat: [flat])(False) == [False]


def test_vllms_functions_are_replaced_once(monkeypatch):
    """Every start of an engine asks for it; a model can be loaded more than once in one process."""
    module: Any = ModuleType(_MODULE)
    module.convert_ids_list_to_tokens = Tokenizer.texts
    module.create_sample_logprobs = lambda flat: SimpleNamespace(flat=flat)
    monkeypatch.setitem(sys.modules, _MODULE, module)
    vllm: Any = SimpleNamespace(
        AsyncEngineArgs=dict,
        AsyncLLM=SimpleNamespace(from_engine_args=lambda *_, **__: None),
        UsageContext=SimpleNamespace(API_SERVER=None),
        disable_envs_cache=None,
        enable_envs_cache=None,
    )
    vllm_api.start(vllm, {})
    decode, create = module.convert_ids_list_to_tokens, module.create_sample_logprobs
    keep_small()
    assert module.convert_ids_list_to_tokens is decode
    assert module.create_sample_logprobs is create
    tokenizer = Tokenizer()
    decode(tokenizer, [5])
    assert decode(tokenizer, [5]) == ["5"]
    assert create(True).logprobs == array("d")
    vllm_api.forget_texts()
    decode(tokenizer, [5])
    assert tokenizer.decoded == [5, 5]


@pytest.mark.parametrize("name", ["convert_ids_list_to_tokens", "create_sample_logprobs"])
def test_a_vllm_without_a_function_keeps_the_other_small(monkeypatch, name):
    """It decodes, or stores, in a way of its own: 0.11 has no flat log probabilities."""
    module: Any = ModuleType(_MODULE)
    setattr(module, name, lambda *_: None)
    monkeypatch.setitem(sys.modules, _MODULE, module)
    keep_small()
    vllm_api.forget_texts()
    assert isinstance(getattr(module, name), (TokenTexts, InArrays))
    assert [key for key in vars(module) if not key.startswith("__")] == [name]


def test_a_vllm_without_the_module_is_left_as_it_is(monkeypatch):
    """Nothing is there to replace, or to forget."""
    monkeypatch.setitem(sys.modules, _MODULE, None)
    keep_small()
    vllm_api.forget_texts()
