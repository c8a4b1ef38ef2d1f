"""loadtest.answers: what a results file holds, in which order, and what it costs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from loadtest.answers import SEPARATOR, JsonLines, TextStore, check_writable
from loadtest.errors import ClientError
from loadtest.record import Outcome, Record, Request

if TYPE_CHECKING:
    from pathlib import Path


def record(index: int, text: str, *, prompt: str = "p", is_chat: bool = False) -> Record:
    request = Request(index, prompt, {}, stream=True, is_chat=is_chat)
    return Record(request, due=11.0, sent=11.5, times=[12.0, 12.5], pieces=[[text]], outcome=Outcome.ANSWERED)


def test_texts_are_stored_in_the_order_of_the_requests(tmp_path: Path) -> None:
    """Whichever was ready first; a request that has no answer has an empty one."""
    store = TextStore(tmp_path)
    for index, text in ((3, " é"), (0, "first"), (2, "")):
        store.add(record(index, text))
    store.write(tmp_path / "results.txt")
    assert (tmp_path / "results.txt").read_text("utf-8") == "".join(f"{text}\n{SEPARATOR}" for text in ("first", "", "", " é"))


def test_all_completions_are_stored(tmp_path: Path) -> None:
    """Each on lines of its own, as in the sample."""
    store = TextStore(tmp_path)
    both = record(0, "one")
    both.pieces.append(["t", "wo"])
    store.add(both)
    assert list(store.texts()) == ["one\ntwo"]


def test_json_lines_have_each_record_when_it_has_ended(tmp_path: Path) -> None:
    """With its place, its texts and its times since the start; a chat as JSON."""
    lines = JsonLines(tmp_path / "r.jsonl", started=10.0)
    lines.add(record(1, " there", prompt='[{"role": "user"}]', is_chat=True))
    failed = Record(Request(0, "p", {}, stream=True), due=11.0, sent=11.0)
    failed.fail("timeout", "too late")
    lines.add(failed)
    lines.close()
    first, second = map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())
    assert first == {
        "index": 1,
        "prompt": [{"role": "user"}],
        "outcome": "answered",
        "completions": [" there"],
        "finish_reasons": [],
        "input_tokens": None,
        "output_tokens": None,
        "due": 1.0,
        "sent": 1.5,
        "times": [2.0, 2.5],
        "error": None,
    }
    assert (second["index"], second["outcome"], second["error"]) == (0, "failed", "too late")


def test_looking_whether_a_file_can_be_written_leaves_it_as_it_is(tmp_path: Path) -> None:
    """Neither an empty file nor a shorter one."""
    there, new = tmp_path / "there", tmp_path / "new"
    there.write_text("kept")
    check_writable(there, "--report")
    check_writable(new, "--report")
    assert there.read_text() == "kept"
    assert not new.exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """With the option that names another."""
    for use in (lambda path: check_writable(path, "--results-file"), TextStore(tmp_path).write):
        with pytest.raises(ClientError, match=r"cannot write .*: Is a directory; .*--results-file"):
            use(tmp_path)
