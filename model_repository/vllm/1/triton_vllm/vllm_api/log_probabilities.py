"""Let vLLM keep the log probabilities of an answer in little memory."""

from __future__ import annotations

import contextlib
import importlib
from array import array
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    _Decode = Callable[[Any, Sequence[int]], list[str]]


def keep_small() -> None:
    """Decode the text of each token once, and keep numbers in arrays, from now on.

    vLLM itself keeps each text and each number as an object until the answer ends: 10 million for
    300 streams of 800 tokens with 20 log probabilities.
    """
    # Patch texts-of-tokens: vLLM decodes every token of every output (since 0.11;
    # v1/engine/logprobs.py, _update_sample_logprobs). An output with 20 log probabilities took 120
    # us, and now 30 (26 November 2026).
    # Patch log-probabilities-in-arrays: vLLM's flat log probabilities are lists of objects (since
    # 0.12; logprobs.py, FlatLogprobs): 92 bytes for each, and now 34 (29 November 2026).
    # Each may go when vLLM does so itself. A vLLM without such a name keeps its own way.
    with contextlib.suppress(ImportError):
        module: Any = importlib.import_module("vllm.v1.engine.logprobs")
        # A model may be loaded again in this process.
        with contextlib.suppress(AttributeError):
            decode = module.convert_ids_list_to_tokens
            if not isinstance(decode, TokenTexts):
                module.convert_ids_list_to_tokens = TokenTexts(decode)
        with contextlib.suppress(AttributeError):
            create = module.create_sample_logprobs
            if not isinstance(create, InArrays):
                module.create_sample_logprobs = InArrays(create)


def forget_texts() -> None:
    """Forget the texts of all tokens.

    Call it while no request is in flight. Texts that were decoded during many requests lie between
    the objects of those. Python gives a megabyte back only when no object lives in it.
    """
    with contextlib.suppress(ImportError, AttributeError):
        module: Any = importlib.import_module("vllm.v1.engine.logprobs")
        module.convert_ids_list_to_tokens.forget()


class TokenTexts:
    """Decodes tokens one by one, each only once.

    Args:
        decode: vLLM's function that returns the text of each of a tokenizer's tokens.
    """

    def __init__(self, decode: _Decode) -> None:
        self._decode = decode
        # Token id -> text, for each tokenizer. An adapter may have its own.
        self._texts: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()

    def __call__(self, tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token, in a list that the caller may change."""
        try:
            texts = self._texts.setdefault(tokenizer, {})
        except TypeError:
            # A model's own tokenizer may have no hash. An error here would end the engine.
            return self._decode(tokenizer, token_ids)
        new = [token for token in token_ids if token not in texts]
        if new:
            texts.update(zip(new, self._decode(tokenizer, new), strict=True))
        return [texts[token] for token in token_ids]

    def forget(self) -> None:
        """Forget all texts."""
        self._texts.clear()


class InArrays:
    """Makes vLLM's flat log probabilities, with arrays in place of lists of numbers.

    Args:
        create: vLLM's function that makes what keeps the log probabilities of an answer.
    """

    def __init__(self, create: Callable[[bool], Any]) -> None:
        self._create = create

    def __call__(self, flat_logprobs: bool) -> Any:  # noqa: FBT001 - as vLLM calls it
        """Return what keeps the log probabilities of an answer."""
        kept = self._create(flat_logprobs)
        if flat_logprobs:
            # Nearly all ranks are small numbers, which Python keeps once.
            for name in ("start_indices", "end_indices", "token_ids"):
                setattr(kept, name, array("q"))
            kept.logprobs = array("d")
        return kept
