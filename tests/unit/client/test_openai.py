"""loadtest.openai: real HTTP to a server that echoes."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import client as command
from loadtest.answers import as_json
from loadtest.endpoint import Endpoint
from loadtest.errors import ClientError, InputError, NoSuchModelError, ServerGoneError
from loadtest.loops import closed_loop
from loadtest.measures import Measures
from loadtest.openai import OpenAIClient
from loadtest.options import parse
from loadtest.record import Outcome, Record, Request
from loadtest.versus import Comparison, send_in_turns
from support.client_run import CLIENT, PROMPTS, SCHEMA, matches, run
from support.grpc_echo import EchoServer
from support.openai_echo import OpenAIEcho
from support.patience import LIMIT, pause, wait_for
from vllm_env.serve.server import free_ports

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def request(index: int, prompt: str, *, stream: bool = False, **values: Any) -> Request:
    return Request(index, prompt, {"temperature": 0, **values.pop("parameters", {})}, stream=stream, **values)


def ask(
    server: OpenAIEcho, requests: Sequence[Request], *, places: int = 64, connections: int = 0, **values: Any
) -> dict[int, Record]:
    """Send the requests and return their records by index."""
    done: list[Record] = []

    async def send() -> None:
        async with OpenAIClient(Endpoint(**{"url": server.url, "model": "", "stream_timeout": 60.0} | values)) as client:
            await client.require_model(["image"] if any(each.images for each in requests) else ["text_input"])
            await client.connect(connections)
            await closed_loop([client] * places, ((each,) for each in requests), done.append)

    asyncio.run(send())
    return {record.request.index: record for record in done}


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


def test_an_adapter_is_a_model_here() -> None:
    """Its name is no sampling parameter of vLLM's server."""
    with OpenAIEcho() as server:
        ask(server, [request(0, "x", parameters={"lora_name": "adapter"})])
        assert server.asked[0][1]["model"] == "adapter"
        assert "lora_name" not in server.asked[0][1]


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


def test_streams_share_a_connection() -> None:
    """A request that had to connect first would have a longer time to first token."""
    with OpenAIEcho(pause=0.01) as server:
        found = ask(server, [request(number, "x", stream=True) for number in range(50)], places=1)
        assert len(server.connections) == 1
    assert {record.outcome for record in found.values()} == {Outcome.ANSWERED}


def test_the_last_line_may_lack_its_end() -> None:
    """The answer is complete."""
    with OpenAIEcho(cut=-2) as server:
        found = ask(server, [request(0, "some text", stream=True)])[0]
    assert (found.outcome, found.output_tokens, found.finish_reasons) == (Outcome.ANSWERED, 13, ("length",))


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


def test_parameters_of_a_prompt_leave_the_request_as_it_is() -> None:
    """A line of JSONL may have any."""
    parameters = {"stream": False, "stream_options": {}, "model": "adapter", "prompt": "other"}
    with OpenAIEcho() as server:
        found = ask(server, [request(0, "x", stream=True, parameters=parameters)])[0]
        body = server.asked[0][1]
    assert (body["model"], body["stream_options"]) == ("echo", {"include_usage": True})
    assert (found.text, found.output_tokens) == (" 0: x", 5)


def test_no_answer_within_the_timeout() -> None:
    """The message names the option, as with Triton."""
    with OpenAIEcho(delay=lambda _: 600.0) as server:
        record = ask(server, [request(0, "x")], stream_timeout=0.2)[0]
    assert (record.failure, record.reason) == ("timeout", "no complete answer within 0.2 s (--stream-timeout)")


def test_a_request_is_given_up_after_its_pieces() -> None:
    """The connection is closed, so that the server stops working on it."""
    with OpenAIEcho() as server:
        found = ask(
            server, [request(0, "x" * 500_000, stream=True, cancel_after=3), request(1, "y", stream=True, cancel_after=99)]
        )
        assert server.gone.wait(LIMIT)
    assert found[0].outcome is Outcome.CANCELLED
    assert len(found[0].times) >= 3
    assert found[1].outcome is Outcome.ANSWERED


def test_connections_are_open_before_the_first_request() -> None:
    """Otherwise the first answers would seem slow."""
    with OpenAIEcho() as server:
        ask(server, [request(0, "x")], connections=5)
        assert len(server.connections) == 5


@pytest.mark.parametrize(
    ("models", "values", "reason"),
    [
        (None, {"model": "other"}, r"has no model 'other', but echo, adapter; name one of them with --model"),
        ({"data": []}, {}, r"lists no model; wait for it to load \(--wait-ready 300\)"),
        ([1], {}, r"does not list its models under /v1/models; name vLLM's server"),
        ({"data": [{"id": 1}]}, {"model": "echo"}, r"does not list its models under /v1/models; name vLLM's server"),
        (None, {"key": "secret"}, r"answers /v1/models with status 401: Unauthorized; .*--header"),
    ],
)
def test_what_is_wrong_with_a_server_is_said_before_anything_is_sent(models: Any, values: dict[str, str], reason: str) -> None:
    """With what to do."""
    with OpenAIEcho(key=values.pop("key", "")) as server:
        server.models = models or server.models
        with pytest.raises(ClientError, match=reason):
            ask(server, [request(0, "x")], **values)
        assert server.asked == []


def test_a_redirect_gets_no_headers() -> None:
    """They may have a secret, and the other server may be anybody's."""
    with OpenAIEcho() as other, OpenAIEcho(moved=f"http://{other.url}/v1/models") as server:
        with pytest.raises(ClientError, match=rf"redirects /v1/models to http://{other.url}/v1/models; name the"):
            ask(server, [request(0, "x")], headers={"authorization": "secret"})
        assert not other.connections


def test_headers_are_sent() -> None:
    """As a server with --api-key needs them."""
    with OpenAIEcho(key="Bearer me") as server:
        assert ask(server, [request(0, "x")], headers={"authorization": "Bearer me"})[0].outcome is Outcome.ANSWERED


KEY = "very-secret"


@pytest.mark.parametrize(
    ("key", "flags", "status"), [(KEY, [], 0), ("wrong", [], 1), ("wrong", ["--header", f"authorization=Bearer {KEY}"], 0)]
)
def test_the_key_may_be_in_the_environment(
    key: str, flags: list[str], status: int, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under its usual name; a header on the command line replaces it. It is in nothing that the client prints or writes."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with OpenAIEcho(key=f"Bearer {KEY}") as server:
        done = run("--backend", "openai", "-u", server.url, *flags, "--report", "r.json", cwd=tmp_path)
    assert done.returncode == status, done.stderr
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    for secret in (key, KEY):
        assert secret not in done.stdout + done.stderr + written
    assert ("give its key in OPENAI_API_KEY" in done.stderr) == bool(status)


def test_both_of_two_servers_get_the_key(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they get the headers, and as --help says."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with OpenAIEcho(key=f"Bearer {KEY}") as first, OpenAIEcho(key=f"Bearer {KEY}") as second:
        done = run("--backend", "openai", "-u", first.url, "--versus", second.url, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert len(first.asked) == len(second.asked) == 2


@pytest.mark.parametrize("key", ["sécret", "sec\nret"])
def test_a_key_that_no_header_can_have_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without showing it."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with OpenAIEcho() as server, pytest.raises(InputError, match="OPENAI_API_KEY has a character") as caught:
        ask(server, [request(0, "x")])
    assert key not in str(caught.value)


def test_a_model_that_the_server_does_not_list_is_not_waited_for() -> None:
    """The others are named."""
    began = time.monotonic()
    with OpenAIEcho() as server, pytest.raises(NoSuchModelError, match="has no model 'other', but echo, adapter"):
        ask(server, [request(0, "x")], model="other", wait_ready=600.0)
    assert time.monotonic() - began < LIMIT


def test_a_model_that_was_there_is_waited_for() -> None:
    """After the connection was lost, a router may list others while it loads again."""
    done: list[Record] = []

    async def send() -> None:
        async with OpenAIClient(Endpoint(server.url, "echo", reconnect=60.0)) as client:
            await client.require_model(["text_input"])
            server.models = {"data": [{"id": "adapter"}]}
            load = ((request(number, "x", stream=True),) for number in range(2))
            task = asyncio.create_task(closed_loop([client], load, done.append))
            await asyncio.to_thread(wait_for, lambda: server.listed >= 3, "the client to ask again")
            server.models = {"data": [{"id": "echo"}]}
            await task

    with OpenAIEcho(cut=100) as server:
        asyncio.run(send())
    assert [record.failure for record in done] == ["connection"] * 2


@pytest.mark.parametrize("late", ["server", "model"])
def test_a_server_that_is_still_loading_is_waited_for(late: str) -> None:
    """Whether it does not answer yet, or does not list a model yet."""
    server = OpenAIEcho(port=free_ports().http)
    models = server.models
    if late == "model":
        server.models = {"data": []}
        server.__enter__()

    def load() -> None:
        pause(1.0)
        server.models = models
        if late == "server":
            server.__enter__()

    loading = threading.Thread(target=load)
    loading.start()
    try:
        place = {"url": f"127.0.0.1:{server.port}", "model": "echo"}
        assert ask(server, [request(0, "x")], wait_ready=60.0, **place)[0].outcome is Outcome.ANSWERED
    finally:
        loading.join()
        server.__exit__()


def test_pictures_outside_of_messages_are_refused() -> None:
    """vLLM's server has no other place for them."""
    with OpenAIEcho() as server, pytest.raises(InputError, match="image_url in messages"):
        ask(server, [request(0, "x", images=("aa",))])


def test_a_port_that_speaks_something_else_is_no_server() -> None:
    """Such as Triton's gRPC."""
    with EchoServer() as server, pytest.raises(ClientError, match=r"no OpenAI server answers at .*8000 by default"):
        ask(OpenAIEcho(), [request(0, "x")], url=server.url)


def test_a_server_that_stays_away_ends_the_run() -> None:
    """It is waited for once."""

    async def send() -> None:
        async with OpenAIClient(Endpoint(server.url, "", reconnect=0.3)) as client:
            await client.require_model(["text_input"])
            load = ((request(number, "x"),) for number in range(100))
            task = asyncio.create_task(closed_loop([client] * 4, load, lambda _: None))
            await asyncio.to_thread(wait_for, lambda: len(server.asked) == 4, "requests that wait")
            await asyncio.to_thread(server.__exit__)
            await task

    server = OpenAIEcho(delay=lambda _: 600.0)
    server.__enter__()
    with pytest.raises(ServerGoneError, match=r"lost.* 0\.3 s \(--reconnect\) no OpenAI server answers"):
        asyncio.run(send())


def test_tls_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    """Whoever knows the certificate is answered; without it, or without TLS, no server is found."""
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test", "-days", "2"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "certificate.pem"]
    subprocess.run([*argv, *names], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    with OpenAIEcho(tls=context) as server:
        tls = {"ssl": True, "root_certificates": str(tmp_path / "certificate.pem")}
        assert ask(server, [request(0, "x")], tls=tls)[0].text == " 0: x"
        for wrong in ({"ssl": True}, {"ssl": False}):
            with pytest.raises(ClientError, match="no OpenAI server answers at"):
                ask(server, [request(0, "x")], tls=wrong)
        with pytest.raises(ClientError, match="cannot read the certificates: No such file"):
            ask(server, [request(0, "x")], tls={"ssl": True, "root_certificates": str(tmp_path / "none.pem")})


def test_the_command_measures_vllms_server(prompts: Path, tmp_path: Path) -> None:
    """With the model that the server has, and the same figures; tritonclient is not needed."""
    block = (
        "import sys; sys.modules['tritonclient'] = None; import runpy; sys.path.insert(0, sys.argv[1]); "
        "runpy.run_path(sys.argv.pop(1) + '/client.py', run_name='__main__')"
    )
    with OpenAIEcho() as server:
        flags = ["--backend", "openai", "-u", server.url, "-s", "--report", "r.json", "--results-format", "jsonl"]
        argv = [sys.executable, "-c", block, str(CLIENT.parent), *flags]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    texts = [json.loads(line)["completions"] for line in (tmp_path / "results.txt").read_text().splitlines()]
    assert sorted(texts) == sorted([f" 0: {text}"] for text in PROMPTS.splitlines())
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["backend"], report["model_id"], report["tokens_counted"]) == ("openai", "echo", True)
    assert report["total_output_tokens"] == sum(len(f" 0: {text}") for text in PROMPTS.splitlines())
    assert report["median_tpot_ms"] > 0


def test_a_server_that_does_not_count_tokens_has_no_figures_in_tokens(prompts: Path, tmp_path: Path) -> None:
    """Nor a verdict about a goal for them, whatever it says of a warm-up."""
    with OpenAIEcho(counts=lambda number: number == 0) as server:
        flags = ["-s", "--report", "r.json", "--goodput", "tpot:1000", "--num-warmups", 1]
        done = run("--backend", "openai", "-u", server.url, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "this server does not count tokens" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    matches(report, SCHEMA)
    names = ("total_output_tokens", "output_throughput", "max_output_tokens_per_s", "median_tpot_ms", "request_goodput")
    assert [report[name] for name in names] == [None] * 5


@pytest.mark.parametrize("mode", [[], ["-s"]])
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


def test_triton_and_vllms_server_are_compared(prompts: Path, tmp_path: Path) -> None:
    """The same prompts and sampling parameters; each has its own model."""
    with EchoServer() as first, OpenAIEcho() as second:
        flags = ["--versus", second.url, "--versus-backend", "openai", "-s", "--iterations", 10, "--report", "r.json"]
        done = run("-u", first.url, *flags, cwd=tmp_path)
        asked = sorted(tensors["text_input"][4:].decode() for tensors in first.requests)
        assert asked == sorted(body["prompt"] for _, body in second.asked)
        assert {body["max_tokens"] for _, body in second.asked} == {100}
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["backend"], report["model_id"]) == ("triton", "vllm")
    assert (report["versus"]["model_id"], report["versus"]["completed"]) == ("echo", 20)


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


def test_blocks_begin_with_open_connections(prompts: Path, tmp_path: Path) -> None:
    """The server closes idle ones during the other server's block; to connect again is no part of a block's times."""
    with EchoServer(delay=lambda _: 1.5) as first, OpenAIEcho(idle=0.75) as second:
        flags = ["--versus", second.url, "--versus-backend", "openai", "-s", "--num-prompts", 4, "--max-concurrency", 1]
        done = run("-u", first.url, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(second.asked) == 4
    assert len(second.connections) >= 3  # the server has closed them
    assert second.connected_for_an_answer == 0


def test_to_connect_is_no_part_of_the_load() -> None:
    """Neither of the time for which the client is watched, nor with more connections than a block has requests."""
    slow = 0.05
    asked: list[int] = []

    class SlowClient(OpenAIClient):
        async def connect(self, connections: int) -> None:
            await super().connect(connections)
            asked.append(connections)
            await asyncio.sleep(slow)

    async def send() -> None:
        async with SlowClient(Endpoint(server.url, "echo")) as client:
            load = (request(number, "x") for number in range(40))
            await send_in_turns(
                [client, client],
                load,
                parse(["--versus", server.url, "--max-concurrency", "8"]),
                (lambda _: None, lambda _: None),
                count=40,
                comparison=comparison,
            )

    began = time.perf_counter()
    with OpenAIEcho() as server:
        comparison = Comparison(server.url, "openai")
        asyncio.run(send())
    assert asked == [2] * 40
    assert 0 < comparison.overhead.seconds < time.perf_counter() - began - len(asked) * slow


def test_an_open_loop_begins_with_open_connections(prompts: Path, tmp_path: Path) -> None:
    """Otherwise its times to first token would have the time to connect."""
    with OpenAIEcho(delay=lambda _: 1.0) as server:
        done = run("--backend", "openai", "-u", server.url, "--request-rate", 50, "--num-prompts", 8, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(server.asked) == 8
    assert server.connected_for_an_answer == 0


def test_without_aiohttp_its_name_and_the_remedy_are_said(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, as for a wrong flag. Nobody else needs it."""
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "loadtest.openai")
    assert command.main(["--backend", "openai", "--input-prompts", str(prompts)]) == 2
    error = capsys.readouterr().err
    assert "cannot import aiohttp" in error
    assert error.endswith("-m pip install aiohttp\n")
    assert command.main(["-u", "127.0.0.1:1", "--input-prompts", str(prompts), "--results-file", "/dev/null"]) == 1
