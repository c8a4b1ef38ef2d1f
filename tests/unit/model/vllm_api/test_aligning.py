"""A stream's tokens come with their own text, however much of it vLLM holds back for a stop string."""

from __future__ import annotations

from types import SimpleNamespace as Part

import pytest

from triton_vllm.vllm_api.aligning import Aligner

TEXTS = ["<think>", "\n", "A", " greet", "", "ing\u00e9", ".\n", "</think>", "\n\n", "Hello", ",", " how can I", " help?", ""]


def decode(ids):
    """Return the text of tokens; the fourth begins a character that the fifth ends."""
    text = "".join(TEXTS[i] for i in ids)
    return text + "\ufffd" if ids[-1] == 4 else text


def held_back(held, sizes, cut=None, tokens=14):
    """What vLLM makes of the tokens: `sizes` of them at once, the last `held` characters not before the end, at `cut`."""
    text, sent, ids = "", 0, list(range(tokens))
    while ids:
        count = sizes[0] if len(sizes) == 1 else sizes.pop(0)
        new, ids = ids[:count], ids[count:]
        text += "".join(TEXTS[i] for i in new)
        until = max(sent, len(text) - held) if ids else len(text) if cut is None else cut
        yield Part(text=text[sent:until], token_ids=new, finish_reason=None if ids else "stop")
        sent = until


@pytest.mark.parametrize("held", [1, 2, 5, 8, 20, 37, 1000])
def test_each_token_comes_with_its_text(held):
    """Also those that came before any text, whose length nothing tells but the tokenizer."""
    aligner = Aligner(held, decode)
    found = [piece for part in held_back(held, [1]) for piece in aligner.take(part)]
    assert [(piece.token_ids, piece.text) for piece in found] == [([i], text) for i, text in enumerate(TEXTS)]
    assert [piece.finish_reason for piece in found] == [None] * 13 + ["stop"]


@pytest.mark.parametrize("held", [1, 3, 9, 37, 1000])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1, 1, 1, 3, 3), (3, 4, 5, 2), (14,), (2, 2, 2, 2, 2, 2, 2)])
def test_tokens_that_came_together_come_with_their_texts_too(held, sizes):
    """With `stream_interval` vLLM sends several at once."""
    aligner = Aligner(held, decode)
    found = [piece for part in held_back(held, [*sizes]) for piece in aligner.take(part)]
    assert [(piece.token_ids, piece.text) for piece in found] == [([i], text) for i, text in enumerate(TEXTS)]


@pytest.mark.parametrize("sizes", [(4, 4, 6), (1, 5, 5, 3)])
def test_no_text_waits_for_the_next_tokens(sizes):
    """But for that of a token in whose midst it ends: a request that fails next has had the rest."""
    held, aligner, come, gone = 3, Aligner(3, decode), 0, 0
    ends = [sum(map(len, TEXTS[: i + 1])) for i in range(len(TEXTS))]
    for part in held_back(held, [*sizes]):
        come += len(part.text)
        gone += sum(len(piece.text) for piece in aligner.take(part))
        assert gone == max((end for end in ends if end <= come), default=0)


@pytest.mark.parametrize("sizes", [(1,), (3, 3, 3, 3), (5, 7)])
def test_the_text_ends_where_the_stop_string_began(sizes):
    """Its tokens have come, and its text never does."""
    aligner = Aligner(6, decode)
    cut = "".join(TEXTS).index("can I")
    found = [piece for part in held_back(6, [*sizes], cut, tokens=12) for piece in aligner.take(part)]
    assert "".join(piece.text for piece in found) == "".join(TEXTS)[:cut]
    assert [token for piece in found for token in piece.token_ids] == list(range(12))
    assert next(piece.text for piece in found if piece.token_ids == [7]) == "</think>"


def test_what_a_stream_has_in_front_goes_to_its_first_token():
    """A decoder of whole texts drops a blank that a stream begins with."""
    aligner = Aligner(8, decode)
    assert not aligner.take(Part(text="", token_ids=[0], finish_reason=None))
    assert not aligner.take(Part(text="", token_ids=[1], finish_reason=None))
    found = aligner.take(Part(text=" <think>", token_ids=[2, 3], finish_reason=None))
    assert [(piece.token_ids, piece.text) for piece in found] == [([0], " <think>")]


def test_an_end_without_anything_is_passed_on():
    """A completion that was ended before its first token."""
    (found,) = Aligner(4, decode).take(Part(text="", token_ids=[], finish_reason="abort"))
    assert (found.text, list(found.token_ids), found.finish_reason) == ("", [], "abort")
