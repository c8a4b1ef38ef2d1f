"""The text of a token is decoded once (`support/patch_probes.py` has the real vLLM)."""

from __future__ import annotations

import gc
from weakref import ref

import pytest

from triton_vllm.vllm_api.log_probabilities import TokenTexts


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
