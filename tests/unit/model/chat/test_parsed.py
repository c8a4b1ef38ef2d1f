"""What a conversation's readers find goes into its tensors; what they raise about is answered as plain text."""

from __future__ import annotations

import json
import logging
import time
from types import SimpleNamespace as Output

import pytest

from triton_vllm.base.wants import Wants
from triton_vllm.chat import parsed
from triton_vllm.chat.parsed import AnswerReader
from triton_vllm.reply.response import ChatAssembler
from triton_vllm.vllm_api import Piece


class Reader:
    """In place of vLLM's parsers: `r:` is reasoning, `t:` a tool call, `!` is raised about."""

    aligner = None

    def read(self, part, prompt):
        assert prompt == [7, 8]
        if "!" in part.text:
            raise ValueError("what is this")
        kind, _, text = part.text.rpartition(":")
        calls = [{"function": {"name": text}}] if kind == "t" else []
        reason = "tool_calls" if kind == "t" and part.finish_reason else part.finish_reason
        return Piece("" if kind else text, text if kind == "r" else "", calls, reason)


class Conversation:
    """In place of vLLM's; each completion has a reader of its own."""

    def __init__(self):
        self.readers = []

    def reader(self):
        self.readers.append(Reader())
        return self.readers[-1]


def output(*texts, reason=None):
    parts = [
        Output(index=i, text=t, token_ids=[1], logprobs=None, cumulative_logprob=None, finish_reason=reason, stop_reason=None)
        for i, t in enumerate(texts)
    ]
    return Output(outputs=parts, prompt_token_ids=[7, 8], prompt_logprobs=None, num_cached_tokens=3)


def assembler_of(wants, n, conversation, clock=time.thread_time):
    return ChatAssembler(wants, n, AnswerReader(conversation, n, clock))


def built(assembler, *outputs):
    return {name: array.tolist() for name, array in assembler.build(outputs)}


@pytest.fixture(autouse=True)
def _nothing_noted(monkeypatch):
    monkeypatch.setattr(parsed, "_logged", set())


def test_pieces_of_merged_outputs_are_joined():
    """Under pressure one response carries what several would have."""
    found = built(
        assembler_of(Wants(), 1, Conversation(), lambda: 0.0),
        output("r:a"),
        output("r:b"),
        output("c"),
        output("t:d"),
        output("t:e"),
    )
    assert found["text_output"] == [b"c"]
    assert found["reasoning"] == [b"ab"]
    assert [call["function"]["name"] for call in json.loads(found["tool_calls"][0])] == ["d", "e"]


def test_what_a_parser_raises_about_comes_as_plain_text(caplog):
    """From there on; the log says it once, and the other completions go on."""
    assembler = assembler_of(Wants(finish_reason=True), 2, Conversation(), lambda: 0.0)
    with caplog.at_level(logging.ERROR):
        first = built(assembler, output("r:a", "r:b"), output("!", "r:c"))
        second = built(assembler, output("r:d", "r:e", reason="stop"))
        built(assembler_of(Wants(), 1, Conversation(), lambda: 0.0), output("!"))
    assert (first["text_output"], first["reasoning"]) == ([b"!", b""], [b"a", b"bc"])
    assert (second["text_output"], second["reasoning"]) == ([b"r:d", b""], [b"", b"e"])
    assert second["finish_reason"] == [b"stop", b"stop"]
    assert [record.message for record in caplog.records] == [
        "An answer could not be parsed, and was sent as plain text (logged once)"
    ]


class Slow:
    """A clock that each reading moves on, as a parser does that begins at the first token every time."""

    def __init__(self, seconds):
        self.now, self.seconds, self.read = 0.0, seconds, []

    def __call__(self):
        return self.now

    def reader(self):
        return SlowReader(self)


class SlowReader(Reader):
    def __init__(self, slow):
        self.slow = slow

    def read(self, part, prompt):
        self.slow.now += self.slow.seconds
        self.slow.read.append((part.text, list(part.token_ids), part.finish_reason))
        return Piece(part.text, finish_reason=part.finish_reason)


def test_a_slow_parser_reads_what_has_queued_up_at_once():
    """Else it would fall behind for good, and with it all streams of its thread."""
    slow = Slow(parsed.READ_TURN_S * 0.7)
    assembler = assembler_of(Wants(finish_reason=True), 1, slow, slow)
    found = built(assembler, *(output(text) for text in "abcd"), output("e", reason="stop"))
    assert found["text_output"] == [b"abcde"]
    assert found["finish_reason"] == [b"stop"]
    assert slow.read == [("a", [1], None), ("b", [1], None), ("cde", [1, 1, 1], "stop")]
    assert built(assembler, output("f"))["text_output"] == [b"f"]
