"""What a conversation's readers find goes into its tensors; what they raise about is answered as plain text."""

from __future__ import annotations

import json
import logging
import time
from types import SimpleNamespace
from types import SimpleNamespace as Output

import pytest

from triton_vllm.base.wants import Wants
from triton_vllm.chat import parsed
from triton_vllm.chat.parsed import AnswerReader
from triton_vllm.reply.response import NOTHING, ChatAssembler
from triton_vllm.vllm_api import Fragment, Piece


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
    monkeypatch.setattr(parsed, "_noted", set())


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


def test_every_completion_has_a_reader_and_an_element():
    """Their states must not mix."""
    conversation = Conversation()
    found = built(assembler_of(Wants(finish_reason=True), 2, conversation, lambda: 0.0), output("r:a", "t:b", reason="stop"))
    assert len(conversation.readers) == 2
    assert (found["text_output"], found["reasoning"]) == ([b"", b""], [b"a", b""])
    assert found["tool_calls"] == [b"[]", b'[{"function": {"name": "b"}}]']
    assert found["finish_reason"] == [b"stop", b"tool_calls"]


def test_nothing_new_has_an_element_for_each_completion():
    """As every response; it begins a stream that is stopped before its first text."""
    made = built(assembler_of(Wants(finish_reason=True), 2, Conversation()), NOTHING)
    assert made == {"text_output": [b"", b""], "finish_reason": [b"None"] * 2, "tool_calls": [b"[]"] * 2, "reasoning": [b"", b""]}


def test_usage_comes_with_every_response():
    """Cached tokens are those of the prompt."""
    wants = Wants(num_input_tokens=True, num_output_tokens=True, num_cached_tokens=True)
    found = built(assembler_of(wants, 1, Conversation(), lambda: 0.0), output("a"), output("b", reason="stop"))
    assert (found["num_input_tokens"], found["num_output_tokens"], found["num_cached_tokens"]) == ([2], [2], [3])


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
    slow = Slow(parsed.READ_S * 0.7)
    assembler = assembler_of(Wants(finish_reason=True), 1, slow, slow)
    found = built(assembler, *(output(text) for text in "abcd"), output("e", reason="stop"))
    assert found["text_output"] == [b"abcde"]
    assert found["finish_reason"] == [b"stop"]
    assert slow.read == [("a", [1], None), ("b", [1], None), ("cde", [1, 1, 1], "stop")]
    assert built(assembler, output("f"))["text_output"] == [b"f"]


def test_a_quick_parser_reads_output_by_output():
    """As vLLM has made them: some parsers read several at once otherwise."""
    slow = Slow(parsed.READ_S / 100)
    built(assembler_of(Wants(), 1, slow, slow), *(output(text) for text in "abcdefgh"))
    assert [text for text, _, _ in slow.read] == list("abcdefgh")


def test_a_slow_parser_reads_the_first_of_each_completion_alone():
    """Also of those whose turn comes after the time is up: some parsers know the mark of reasoning only by itself."""
    slow = Slow(parsed.READ_S * 2)
    built(assembler_of(Wants(), 2, slow, slow), output("a", "A"), output("b", "B"), output("c", "C"))
    assert [text for text, _, _ in slow.read] == ["a", "bc", "A", "BC"]


class LateConversation(Conversation):
    """Of readers whose aligner passes on at the end what came before it."""

    def reader(self):
        reader = super().reader()
        held = []

        def take(part):
            held.append(Fragment(part.text, part.token_ids, part.finish_reason))
            return held if part.finish_reason else []

        reader.aligner = SimpleNamespace(take=take)
        return reader


def test_what_is_aligned_is_read_and_nothing_of_it_is_lost_where_a_parser_raises():
    """The text of tokens that waited for theirs included."""
    assembler = assembler_of(Wants(), 1, LateConversation(), lambda: 0.0)
    assert built(assembler, output("r:why"))["reasoning"] == [b""]
    found = built(assembler, output("a!"), output("t:b"), output("c", reason="stop"))
    assert (found["reasoning"], found["text_output"], found["tool_calls"]) == ([b"why"], [b"a!t:bc"], [b"[]"])
