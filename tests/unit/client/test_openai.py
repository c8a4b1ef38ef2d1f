"""loadtest.openai: real HTTP to a server that echoes; answers and figures. test_openai_server.py has the way to a server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from loadtest.answers import as_json
from loadtest.errors import InputError
from loadtest.measures import Measures
from loadtest.record import Outcome
from support.client_run import SCHEMA, matches, run
from support.openai_ask import ask, request
from support.openai_echo import OpenAIEcho

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_a_record_is_that_of_its_prompt(streaming: bool, chat: bool) -> None:
    """Its text, the tokens that the server counted, the reason of the end; what only has the role of a chat is no piece."""
    texts = ["slow", "é𝄞", "three"]
    prompts = [json.dumps([{"role": "user", "content": text}]) if chat else text for text in texts]
    with OpenAIEcho(delay=lambda number: 0.3 if number == 0 else 0.0) as server:
        found = ask(server, [request(number, text, stream=streaming, is_chat=chat) for number, text in enumerate(prompts)])
        assert {path for path, _ in server.asked} == {"/v1/chat/completions" if chat else "/v1/completions"}
        assert all(body["model"] == "echo" and body["temperature"] == 0 for _, body in server.asked)
        assert all((body.get("stream_options") == {"include_usage": True}) == streaming for _, body in server.asked)
    for number, text in enumerate(texts):
        answer = f" 0: {text}"
        assert (found[number].outcome, found[number].completions) == (Outcome.ANSWERED, [answer])
        assert (found[number].input_tokens, found[number].output_tokens) == (len(text), len(answer))
        assert found[number].finish_reasons == ("length" if streaming else "stop",)
        assert len(found[number].times) == (len(answer) if streaming else 1)
        assert found[number].sent <= found[number].times[0] <= found[number].times[-1]


@pytest.mark.parametrize("streaming", [False, True])
def test_several_completions_are_in_their_order(streaming: bool) -> None:
    """The echo sends a whole answer's last one first."""
    with OpenAIEcho() as server:
        record = ask(server, [request(0, "x", stream=streaming, parameters={"n": 3})])[0]
    assert record.completions == [" 0: x", " 1: x", " 2: x"]
    assert record.output_tokens == 15
    assert len(record.finish_reasons) == 3


@pytest.mark.parametrize(("streaming", "failure"), [(False, "status 400"), (True, "error from the model")])
def test_an_error_is_that_of_its_prompt(streaming: bool, failure: str) -> None:
    """Whether it comes as a status, or within a stream; the others have their answers."""
    with OpenAIEcho() as server:
        found = ask(server, [request(number, text, stream=streaming) for number, text in enumerate(["a", "fail", "c"])])
    assert [found[number].outcome for number in range(3)] == [Outcome.ANSWERED, Outcome.FAILED, Outcome.ANSWERED]
    assert (found[1].failure, found[1].reason) == (failure, "told to fail")


@pytest.mark.parametrize(("cut", "failure"), [(100, "connection"), (-20, "no complete answer")])
def test_a_stream_that_ends_early_is_no_answer(cut: int, failure: str) -> None:
    """Whether the connection is lost, or the server ends it in order."""
    with OpenAIEcho(cut=cut) as server:
        found = ask(server, [request(0, "some text", stream=True)])[0]
    assert (found.outcome, found.failure) == (Outcome.FAILED, failure)


PIECE = '{"choices": [{"index": 0, "text": "a"}], "error": null}'


NULLS = ('{"choices": null}', '{"choices": [{"index": 0, "delta": null}]}')


@pytest.mark.parametrize(
    ("events", "failure", "tokens"),
    [
        (['{"choices": [], "usage": {"completion_tokens": 0}}', "[DONE]"], "no response", 0),
        (['{"choices": [{"index": 0, "delta": {"role": "assistant"}}]}', "[DONE]"], "no response", None),
        ([PIECE, '{"choices": [], "usage": {"completion_tokens": null}}', "[DONE]"], "", None),
        ([PIECE, '{"choices": [], "usage": {"completion_tokens": 0}}', "[DONE]"], "", 0),
        ([PIECE, *NULLS, "[DONE]"], "", None),
        ([PIECE, '{"choices": [], "usage": {"completion_tokens": 5}}', "[DONE]", PIECE], "", 5),
        ([PIECE, '{"choices": [], "usage": {"completion_tokens": "x"}}', "[DONE]"], "wrong answer", None),
        ([PIECE, '{"error": {"message": "lost"}}', "[DONE]"], "error from the model", None),
    ],
)
def test_a_strange_stream_does_not_end_the_run(events: list[str], failure: str, tokens: int | None) -> None:
    """Without a piece there is no answer; pieces are not tokens."""
    with OpenAIEcho(events=events) as server:
        found = ask(server, [request(0, "x", stream=True)])[0]
    assert (found.failure, found.output_tokens) == (failure, tokens)
    assert found.outcome is (Outcome.FAILED if failure else Outcome.ANSWERED)
    measures = Measures()
    measures.add(found)
    assert measures.uncounted == (not failure and tokens is None)
    assert as_json(found, 0.0)["output_tokens"] == tokens


def test_no_answer_within_the_timeout() -> None:
    """The message names the option, as with Triton."""
    with OpenAIEcho(delay=lambda _: 600.0) as server:
        record = ask(server, [request(0, "x")], stream_timeout=0.2)[0]
    assert (record.failure, record.reason) == ("timeout", "no complete answer within 0.2 s (--stream-timeout)")


def test_pictures_outside_of_messages_are_refused() -> None:
    """vLLM's server has no other place for them."""
    with OpenAIEcho() as server, pytest.raises(InputError, match="image_url in messages"):
        ask(server, [request(0, "x", images=("aa",))])


@pytest.mark.parametrize("mode", [[], ["-s"]])
@pytest.mark.long
def test_answers_without_a_count_are_left_out_of_the_figures_in_tokens(mode: list[str], prompts: Path, tmp_path: Path) -> None:
    """They are answers all the same, and the report has their number; they reach no goal for TPOT. Nobody knows the speed."""
    with OpenAIEcho(counts=lambda number: number % 4 != 1) as server:
        goal = ["--goodput", "tpot:60000"] if mode else []
        flags = [*mode, *goal, "--iterations", 10, "--report", "r.json", "--results-format", "jsonl"]
        done = run("--backend", "openai", "-u", server.url, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The server did not count the tokens of 5 of 20 answers: no output tokens/s; TPOT is without them" in done.stdout
    records = [json.loads(line) for line in (tmp_path / "results.txt").read_text().splitlines()]
    counted = [record["output_tokens"] for record in records if record["output_tokens"] is not None]
    report = json.loads((tmp_path / "r.json").read_text())
    assert (len(counted), report["uncounted"], report["completed"], report["tokens_counted"]) == (15, 5, 20, True)
    assert report["total_output_tokens"] == sum(counted)
    assert (report["output_throughput"], report["total_token_throughput"]) == (None, None)
    matches(report, SCHEMA)
    if mode:
        assert report["median_tpot_ms"] > 0
        assert report["request_goodput"] == pytest.approx(15 / report["duration"])


@pytest.mark.long
def test_two_servers_are_not_compared_in_tokens_that_one_has_not_counted(prompts: Path, tmp_path: Path) -> None:
    """Its blocks would seem slower by what is missing. In the other blocks the two are compared."""
    with OpenAIEcho() as first, OpenAIEcho(counts=lambda number: number >= 28 or number % 2 == 0) as second:
        flags = ["--versus", second.url, "-s", "--num-prompts", 40, "--max-concurrency", 1, "--report", "r.json"]
        done = run("--backend", "openai", "-u", first.url, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{second.url} did not count the tokens of 14 of 40 answers: no output tokens/s; TPOT is without them" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    matches(report, SCHEMA)
    assert (report["uncounted"], report["versus"]["uncounted"]) == (0, 14)
    assert report["output_throughput"] > 0
    assert [pair[1] is None for pair in report["versus"]["output_throughput"]["blocks"]] == [True] * 14 + [False] * 6
    assert report["versus"]["output_throughput"]["pairs"] == 6


@pytest.mark.long
def test_an_open_loop_begins_with_open_connections(prompts: Path, tmp_path: Path) -> None:
    """Otherwise its times to first token would have the time to connect."""
    with OpenAIEcho(delay=lambda _: 1.0) as server:
        done = run("--backend", "openai", "-u", server.url, "--request-rate", 50, "--num-prompts", 8, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(server.asked) == 8
    assert server.connected_for_an_answer == 0
