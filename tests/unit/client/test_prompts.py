"""loadtest.prompts and random_prompts: what is a prompt, and which requests are made of them."""

from __future__ import annotations

import base64
import itertools
import json
from typing import TYPE_CHECKING

import pytest

from loadtest.errors import InputError
from loadtest.prompts import Prompt, RepeatedPrompts, RequestSettings, find_prompts, load_prompts, make_requests
from loadtest.random_prompts import RandomPrompts
from support.repositories import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

A = RepeatedPrompts((Prompt("a"),))
SETTINGS = RequestSettings(stream=True, parameters={"temperature": 0, "max_tokens": 100})


def test_a_line_is_a_prompt(tmp_path: Path) -> None:
    """Blank lines, a byte order mark and carriage returns are not; other separators and spaces belong to the prompt."""
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffone\r\n\n  two \n \t\nthree\x0cand\u2028more".encode())
    assert [prompt.text for prompt in load_prompts(file)] == ["one", "  two ", "three\x0cand\u2028more"]


def test_the_prompts_here_come_before_those_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tutorial's command works from any folder; a file that is named is never replaced by another."""
    monkeypatch.chdir(tmp_path)
    assert find_prompts(None) == CHECKOUT / "prompts.txt"
    assert find_prompts(tmp_path / "missing") == tmp_path / "missing"
    (tmp_path / "prompts.txt").touch()
    assert str(find_prompts(None)) == "prompts.txt"


def test_json_lines_have_chats_pictures_and_parameters(tmp_path: Path) -> None:
    """Names of pictures are relative to the file; a prompt's own parameters come before those of the run."""
    (tmp_path / "red.png").write_bytes(b"picture")
    messages = [{"role": "user", "content": "hi"}]
    lines = [
        {"prompt": "one", "parameters": {"max_tokens": 5}},
        {"messages": messages, "images": ["red.png"]},
        {"prompt": "three"},
    ]
    file = tmp_path / "p.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    one, two, three = make_requests(RepeatedPrompts(load_prompts(file)), SETTINGS, count=3)
    assert (one.prompt, one.is_chat, one.parameters) == ("one", False, {"temperature": 0, "max_tokens": 5})
    assert (json.loads(two.prompt), two.is_chat) == (messages, True)
    assert two.images == (base64.b64encode(b"picture").decode(),)
    assert three.parameters is SETTINGS.parameters


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", 'either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'either "prompt" or "messages"'),
        ('{"prompt": 5}', "must be a string"),
        ('{"messages": "hi"}', "must be a list of messages"),
        ('{"prompt": "a", "parameters": 5}', "must be an object"),
        ('{"prompt": "a", "images": "x"}', "must be a list of file names"),
        ('{"prompt": "a", "images": ["none.png"]}', r"cannot read the picture .*none\.png: No such file"),
        ('{"prompt": "a", "max_tokens": 5}', "unknown field 'max_tokens'; known are"),
    ],
)
def test_a_wrong_line_is_named(line: str, reason: str, tmp_path: Path) -> None:
    """With its number in the file."""
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"prompt": "good"}}\n\n{line}\n')
    with pytest.raises(InputError, match=rf"p\.jsonl, line 3: .*{reason}"):
        load_prompts(file)


def test_a_share_of_the_requests_is_cancelled() -> None:
    """The same ones for the same seed, after one piece or more."""
    cancelling = RequestSettings(stream=True, parameters={}, cancel_rate=0.3, seed=5)
    made = [request.cancel_after for request in make_requests(A, cancelling, count=1000)]
    cancelled = [after for after in made if after is not None]
    assert 250 < len(cancelled) < 350
    assert (min(cancelled), max(cancelled)) == (1, 16)
    assert made == [request.cancel_after for request in make_requests(A, cancelling, count=1000)]
    assert all(request.cancel_after is None for request in make_requests(A, SETTINGS, count=100))


def test_random_prompts_have_their_lengths_and_a_common_beginning() -> None:
    """No two are the same, so that no cache holds more than the prefix; the same ones for the same seed."""
    source = RandomPrompts(words=20, prefix_words=7, seed=1)
    made = list(itertools.islice(source, 50))
    words = [prompt.text.split() for prompt in made]
    assert {len(each) for each in words} == {27}
    assert len({tuple(each[:7]) for each in words}) == 1
    assert len({tuple(each[7:]) for each in words}) == 50
    assert made == list(itertools.islice(source, 50))
    assert made != list(itertools.islice(RandomPrompts(words=20, prefix_words=7, seed=2), 50))
