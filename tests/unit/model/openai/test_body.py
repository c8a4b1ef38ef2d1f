"""Bodies: how large, how slow and how deep they may be."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace

import pytest

from support.patience import LIMIT
from triton_vllm.base.errors import AdapterError, UnavailableError
from triton_vllm.base.limits import USUAL
from triton_vllm.openai import body
from triton_vllm.openai.body import VALUES, Bodies, parse
from triton_vllm.openai.interrupt import Gone, Interrupt
from triton_vllm.openai.refusal import HttpRefusalError
from triton_vllm.vllm_api import Facts

SEEING, READING = Facts(max_tokens=100), Facts(max_tokens=100, multimodal=False)
SMALL = replace(USUAL, max_request_bytes=100, max_text_bytes=20, max_parameter_bytes=10, max_json_depth=4)


async def read(bodies, receive, declared=None):
    """Return a body when it takes no room any more."""
    with Interrupt(set()) as interrupt, ExitStack() as until_passed_on:
        return await bodies.read(receive, declared, interrupt, until_passed_on)


def unfinished(begun: bytes):
    """Return what returns the first part of a body, an event that is set when the next is awaited, and one that ends it."""
    pieces = [{"type": "http.request", "body": begun, "more_body": True}]
    waits, end = asyncio.Event(), asyncio.Event()

    async def receive():
        if pieces:
            return pieces.pop()
        waits.set()
        await end.wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    return receive, waits, end


@pytest.fixture
def from_50_on(monkeypatch):
    """Bodies of more than 50 bytes count as large."""
    monkeypatch.setattr(body, "SMALL", 50)


def messages(*pieces: bytes):
    """Return what returns ASGI's messages with these pieces of a body."""
    waiting = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    waiting.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive():
        return waiting.pop(0)

    return receive


@pytest.mark.parametrize("declared", [101, None])
async def test_a_body_that_is_too_large_is_refused(declared):
    """A declared length before anything is read, another one as soon as it is too much."""
    with pytest.raises(HttpRefusalError, match="more than 100 bytes") as raised:
        await read(Bodies(SMALL), messages(b"a" * 50, b"a" * 51, b"never read"), declared)
    assert raised.value.status == 413


async def test_a_body_that_does_not_arrive_is_refused():
    """And the memory of what has arrived is free again."""
    pieces = [{"type": "http.request", "body": b"a" * 60, "more_body": True}]

    async def receive():
        if not pieces:
            await asyncio.Event().wait()
        return pieces.pop()

    bodies = Bodies(SMALL, arrival_s=0.01, at_once=100)
    with pytest.raises(HttpRefusalError, match="has not arrived") as raised:
        await read(bodies, receive, None)
    assert raised.value.status == 408
    assert await read(bodies, messages(b"a" * 60), None)


@pytest.mark.usefixtures("from_50_on")
async def test_large_bodies_together_are_bounded():
    """Each alone would be small enough. The next one is not read further until there is room."""
    first, waits, end = unfinished(b"a" * 60)
    bodies = Bodies(SMALL, at_once=100)
    reading = asyncio.ensure_future(read(bodies, first, 60))
    await waits.wait()
    second, further, last = unfinished(b"b" * 60)
    waiting = [asyncio.ensure_future(read(bodies, second, 80)), asyncio.ensure_future(read(bodies, messages(b"c" * 60)))]
    await asyncio.sleep(0.01)
    assert not further.is_set()
    assert await read(bodies, messages(b"small")) == b"small"
    end.set()
    assert len(await reading) == 60
    await further.wait()
    assert not waiting[1].done()
    last.set()
    assert await asyncio.gather(*waiting) == [b"b" * 60, b"c" * 60]


@pytest.mark.usefixtures("from_50_on")
async def test_bodies_that_never_finish_keep_no_small_ones_out():
    """Large ones wait for room as long as a body may take to arrive."""
    bodies = Bodies(SMALL, arrival_s=0.1, at_once=100)
    slow, waits, _ = unfinished(b"a" * 60)
    reading = asyncio.ensure_future(read(bodies, slow, 100))
    await waits.wait()
    # However slow the machine is, the next one still waits when the time of the first is over.
    bodies._arrival_s = LIMIT
    large = asyncio.ensure_future(read(bodies, messages(b"b" * 60)))
    assert await read(bodies, messages(b"small")) == b"small"
    with pytest.raises(HttpRefusalError, match="has not arrived"):
        await reading
    assert await large == b"b" * 60


@pytest.mark.usefixtures("from_50_on")
async def test_a_body_that_gets_no_room_is_refused():
    """It may come again. Nobody behind it waits for it."""
    bodies = Bodies(SMALL, arrival_s=0.05, at_once=120)
    with ExitStack() as until_passed_on:
        with Interrupt(set()) as interrupt:
            assert await bodies.read(messages(b"a" * 60), 60, interrupt, until_passed_on)
        with pytest.raises(UnavailableError, match="try again later"):
            await read(bodies, messages(b"b" * 70), 70)
        bodies._arrival_s = LIMIT
        cancelled = asyncio.ensure_future(read(bodies, messages(b"c" * 70), 70))
        waiting = asyncio.ensure_future(read(bodies, messages(b"d" * 60), 60))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert await waiting == b"d" * 60
    assert await read(bodies, messages(b"a" * 100))


@pytest.mark.usefixtures("from_50_on")
async def test_a_body_without_a_length_keeps_only_the_room_it_needs():
    """While it arrives, it may become as large as the largest."""
    bodies = Bodies(SMALL, at_once=120)
    with ExitStack() as until_passed_on, Interrupt(set()) as interrupt:
        await bodies.read(messages(b"a" * 60), None, interrupt, until_passed_on)
        assert await asyncio.wait_for(read(bodies, messages(b"b" * 60), 60), 5)
    slow, waits, _ = unfinished(b"a" * 60)
    leaving = asyncio.ensure_future(read(bodies, slow))
    await waits.wait()
    leaving.cancel()
    assert await asyncio.wait_for(read(bodies, messages(b"b" * 100)), 5)


@pytest.mark.usefixtures("from_50_on")
async def test_the_largest_body_always_has_room():
    """However little room the bodies have together."""
    assert len(await read(Bodies(SMALL, at_once=60), messages(b"a" * 51, b"a" * 40))) == 91
    unlimited = Bodies(replace(SMALL, max_request_bytes=0), arrival_s=0.05, at_once=60)
    for declared in (91, None, 91):
        assert len(await read(unlimited, messages(b"a" * 61, b"a" * 10, b"a" * 20), declared)) == 91


@pytest.mark.usefixtures("from_50_on")
async def test_a_body_counts_until_it_is_passed_on():
    """It may wait for the trial of a constraint, and with it a thousand others."""
    bodies = Bodies(SMALL, at_once=100)
    with ExitStack() as until_passed_on, Interrupt(set()) as interrupt:
        await bodies.read(messages(b"a" * 60), None, interrupt, until_passed_on)
        next_one = asyncio.ensure_future(read(bodies, messages(b"a" * 60)))
        await asyncio.sleep(0.01)
        assert not next_one.done()
    assert await next_one


async def test_a_client_that_goes_is_no_error():
    """Nobody reads an answer."""

    async def receive():
        return {"type": "http.disconnect"}

    with pytest.raises(Gone):
        await read(Bodies(SMALL), receive, None)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "not valid JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b'{"a": [[[[1]]]]}', "at most 4 levels"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": "\\ud800"}', "lone surrogate"),
        (b'{"n": 1, "m": {"n": 1}, "n": 2}', "has the name 'n' twice"),
        (b'{"a": [{"n": 1, "\\u006e": 1}]}', "has the name 'n' twice"),
        (b'{"a": "\xff"}', "not UTF-8"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_json_is_refused(body, text):
    """The parser's limits are ours, not vLLM's."""
    with pytest.raises(AdapterError, match=text):
        parse(replace(USUAL, max_json_depth=4), body, READING)


def test_only_media_may_be_long():
    """A list of 8 MB in JSON takes half a gigabyte in memory; a picture is copied."""
    with pytest.raises(HttpRefusalError, match="without pictures") as raised:
        parse(SMALL, b'{"a": "' + b"x" * 60 + b'"}', SEEING)
    assert raised.value.status == 413
    picture = b'{"a": "data:' + b"x" * 60 + b'"}'
    assert parse(SMALL, picture, SEEING)
    with pytest.raises(HttpRefusalError, match="without pictures"):
        parse(SMALL, picture, READING)


def test_many_small_values_are_refused_before_they_are_parsed():
    """Four million of them stopped all requests for seconds; a model with a long context takes more."""
    body = b'{"prompt": [' + b"1," * (VALUES + 10) + b"1]}"
    with pytest.raises(AdapterError, match="values or more; this model takes at most 262144"):
        parse(USUAL, body, READING)
    assert parse(USUAL, body, Facts(max_tokens=VALUES))
