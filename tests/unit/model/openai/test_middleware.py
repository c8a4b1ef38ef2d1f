"""The middleware in front of vLLM's application, with a stand-in for the application; its loop and its counting are real."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from support.engine_parts import Log
from support.openai_judged import JUDGED
from triton_vllm.base.errors import CancelledError, InvalidRequestError, UnavailableError
from triton_vllm.base.limits import USUAL
from triton_vllm.base.refusals import Refusals
from triton_vllm.engine.fit import Fit
from triton_vllm.engine.jobs import Jobs
from triton_vllm.engine.outcome import Translator
from triton_vllm.instances.counts import Counts
from triton_vllm.openai import middleware
from triton_vllm.openai.body import SHORT
from triton_vllm.openai.checked_engine import JOB
from triton_vllm.openai.fields import PROBES, REFUSED, ROUTES
from triton_vllm.openai.middleware import Middleware
from triton_vllm.vllm_api import BodyType, Facts

TEXT = "/v1/completions"
FIELDS = JUDGED | REFUSED.keys()


class RefusalError(Exception):
    """vLLM's exception for a wrong request."""


class BusyError(Exception):
    """vLLM's exception for a server that takes no requests now."""


VLLM: Any = SimpleNamespace(refusals=(RefusalError,), busy_errors=(BusyError,), client_errors=(ValueError,))


class Gate:
    """Refuses what it is told to refuse."""

    refuses = ""

    def let_in(self):
        if self.refuses:
            raise UnavailableError(f"not {self.refuses}")

    def require_room(self, count, unit):
        pass


class App:
    """In place of vLLM's: notes what reaches it, and answers 200."""

    def __init__(self):
        self.got: list[Any] = []
        self.fails: Exception | None = None

    async def __call__(self, scope, receive, send):
        body = (await receive())["body"]
        self.got.append((scope, body, JOB.get()))
        if self.fails:
            raise self.fails
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answered"})


class Client:
    """Sends requests to the middleware."""

    def __init__(self, key=""):
        self.up = True
        self.log: list[Any] = []
        prompter: Any = Prompter()
        jobs: Any = Jobs(asyncio.get_running_loop(), Translator(VLLM, Log()), USUAL, Counts(), Log())
        jobs.is_up = lambda: self.up
        gate: Any = Gate()
        self.gate, self.app = gate, App()
        rules: Any = SimpleNamespace(
            vllm=VLLM,
            fit=Fit(Facts(max_tokens=100), USUAL, gate),
            jobs=jobs,
            prompter=prompter,
            adapter=self.adapter,
            refusals=Refusals(),
        )
        self.refusals = rules.refusals
        self.prompter = rules.prompter
        self.ledger = jobs.ledger
        self.jobs = jobs
        self.middleware = Middleware(rules, key, lambda *args: self.log.append(args))
        llm: Any = object()
        self.adapters: list[str] = []
        bodies = {path: BodyType((), frozenset(FIELDS)) for path, route in ROUTES.items() if route.method == "POST"}
        application: Any = SimpleNamespace(app=self.app, add_adapter=self.adapters.append, bodies=bodies)
        self.application = application
        self.middleware.application, self.middleware.llm = application, llm

    async def adapter(self, llm, name):
        return SimpleNamespace(request=name) if name == "sql" else None

    async def ask(self, path=TEXT, body: Any = None, method="POST", headers=(), raw_path=None):
        """Return the status and the body of an answer."""
        data = body if isinstance(body, bytes) else json.dumps(body if body is not None else {"prompt": "x"}).encode()
        waiting = [{"type": "http.request", "body": data, "more_body": False}]
        got: list[Any] = []

        async def receive():
            return waiting.pop() if waiting else {"type": "http.disconnect"}

        async def send(message):
            got.append(message)

        scope = {"type": "http", "path": path, "raw_path": raw_path or path.encode(), "method": method}
        scope |= {"headers": [(b"content-length", str(len(data)).encode()), *headers], "query_string": b"a=b"}
        await self.middleware(scope, receive, send)
        return (got[0]["status"], got[1]["body"]) if got else None


class Prompter:
    """Notes what it is asked to check."""

    def __init__(self):
        self.checked: list[Any] = []

    async def check_text(self, llm, text, most):
        self.checked.append(text)

    async def take_turn(self):
        self.checked.append("a turn")

    async def try_constraint(self, llm, constraint):
        self.checked.append(constraint.kind)


async def test_a_request_passes():
    """With what was checked, without the client's other headers, and counted while it is answered."""
    client = Client()
    kept, dropped = (b"content-type", b"application/json"), (b"x-request-id", b"another client's")
    assert await client.ask(headers=[kept, dropped, (b"x-data-parallel-rank", b"7")]) == (200, b"answered")
    ((scope, body, request),) = client.app.got
    assert json.loads(body) == {"prompt": "x"}
    assert scope["headers"] == [kept, (b"content-length", str(len(body)).encode())]
    assert scope["query_string"] == b""
    assert request is not None
    assert client.prompter.checked == ["x"]
    assert client.ledger.is_empty()
    assert client.ledger.count() == 0


async def test_an_escaped_path_is_another_path():
    """The server has decoded it in `path`."""
    assert (await Client().ask(raw_path=b"/v1/%63ompletions"))[0] == 404


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "HEAD", "TRACE", "CONNECT"])
async def test_other_methods_are_refused(method):
    """On every path."""
    client = Client()
    for path in ROUTES:
        assert (await client.ask(path, method=method))[0] == 405
    assert client.app.got == []


@pytest.mark.parametrize("path", PROBES)
async def test_health_is_that_of_the_engine(path):
    """It needs no key, and no application."""
    client = Client(key="secret")
    client.middleware.application = None
    assert await client.ask(path, method="GET") == (200, b"")
    client.up = False
    assert await client.ask(path, method="GET") == (503, b"")
    client.up = True
    client.middleware.leave()
    assert await client.ask(path, method="GET") == (503, b"")


async def test_the_gate_is_asked_first():
    """A request that it refuses is not read."""
    client = Client()
    client.gate.refuses = "awake"
    status, body = await client.ask(body=b"no JSON")
    assert status == 503
    assert json.loads(body)["error"]["message"] == "not awake"


async def test_an_unloading_model_takes_nothing():
    """Health says so, too."""
    client = Client()
    client.middleware.leave()
    assert (await client.ask())[0] == (await client.ask("/v1/models", method="GET"))[0] == 503
    assert client.app.got == []


@pytest.mark.parametrize("given", [b"", b"secret", b"Bearer other", b"Basic secret", b"Bearer", b"Bearer  secret"])
async def test_without_the_key_nothing_is_read(given):
    """On every path but the probes, also on those that vLLM itself leaves open."""
    client = Client(key="secret")
    for path, route in ROUTES.items():
        if path not in PROBES:
            status, _ = await client.ask(path, body=b"no JSON", method=route.method, headers=[(b"authorization", given)])
            assert status == 401, path
    assert client.app.got == []


async def test_with_the_key_it_is():
    """The scheme may be written in any case."""
    client = Client(key="secret")
    assert (await client.ask(headers=[(b"authorization", b"bearer secret")]))[0] == 200


async def test_a_constraint_is_tried_before_the_response_starts():
    """A streamed response could not be refused any more."""
    client = Client()
    await client.ask(body={"prompt": "x", "structured_outputs": {"regex": "a+"}})
    assert client.prompter.checked == ["x", "regex"]


async def test_a_fault_of_the_application_is_logged_once_and_answered():
    """Without the fault's text; and the request counts no more."""
    client = Client()
    client.app.fails = RuntimeError("at /secret/place")
    status, body = await client.ask()
    assert status == 500
    assert b"secret" not in body
    assert [what for what, _ in client.log] == ["vLLM's application failed"]
    assert client.ledger.is_empty()


def raises(error):
    raise error


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (lambda client, job: setattr(job, "refused", InvalidRequestError("no")), "INVALID_ARG"),
        (lambda client, job: client.jobs.abort(job, UnavailableError("no")), "UNAVAILABLE"),
        (lambda client, job: client.jobs.abort(job, CancelledError("no")), ""),
        (lambda client, job: raises(RefusalError("no")), "INVALID_ARG"),
        (lambda client, job: raises(RuntimeError("no")), "INTERNAL"),
        (lambda client, job: None, ""),
    ],
    ids=["refused", "aborted", "cancelled", "vLLM refuses", "vLLM fails", "answered"],
)
async def test_a_request_that_fails_in_the_application_counts_once(fails, reason):
    """Whoever has refused it, and whatever the answer is."""
    client = Client()

    async def app(scope, receive, send):
        fails(client, JOB.get())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    client.application.app = app
    await client.ask()
    assert {name for name, count in client.refusals.counts().items() if count == 1} == {reason} - {""}
    assert sum(client.refusals.counts().values()) == bool(reason)


@pytest.mark.parametrize(("path", "body", "status"), [("/nothing", {}, 404), (TEXT, [1], 400)])
async def test_a_request_that_is_refused_before_the_application_counts(path, body, status):
    """Also one that only HTTP knows."""
    client = Client()
    assert (await client.ask(path, body=body))[0] == status
    client.gate.refuses = "now"
    assert (await client.ask())[0] == 503
    assert {name: count for name, count in client.refusals.counts().items() if count} == {"INVALID_ARG": 1, "UNAVAILABLE": 1}


async def test_a_fault_of_the_checks_is_logged_and_answered(monkeypatch):
    """uvicorn would write a traceback for each such request."""
    client = Client()

    def check(*args):
        raise KeyError("at /secret/place")

    monkeypatch.setattr(middleware, "check", check)
    status, body = await client.ask()
    assert (status, json.loads(body)["error"]["code"]) == (500, 500)
    assert b"secret" not in body
    assert [what for what, _ in client.log] == ["a request to the OpenAI port was not checked"]
    assert client.ledger.is_empty()


async def test_a_refusal_after_the_start_of_a_stream_is_an_event():
    """vLLM asks the engine for a response only after the stream has begun, and answers no exception then."""
    wrapped = RuntimeError("Caught handled exception, but response already started.")  # of Starlette
    wrapped.__cause__ = BusyError("unloaded")
    errors = ((RefusalError("logit_bias"), 400, "logit_bias"), (RuntimeError("/secret"), 500, "server's log"))
    for error, status, said in (*errors, (wrapped, 503, "unloaded")):
        client = Client()
        got: list[Any] = []

        async def app(scope, receive, send, error=error):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise error

        async def send(message, got=got):
            if got and message["type"] == "http.response.start":
                raise RuntimeError("a second start")  # as uvicorn does
            got.append(message)

        async def receive():
            return {"type": "http.request", "body": b'{"prompt": "x"}', "more_body": False}

        client.application.app = app
        await client.middleware({"type": "http", "path": TEXT, "method": "POST", "headers": []}, receive, send)
        name, data, end = got[-1]["body"].decode().split("\n", 2)
        assert (name, end) == ("event: error", "\n")
        answer = json.loads(data.removeprefix("data: "))["error"]
        assert answer["code"] == status
        assert said in answer["message"]
        assert "secret" not in answer["message"]
        assert bool(client.log) == (status == 500)


@pytest.mark.parametrize(("encoding", "expected"), [(b"gzip", 415), (b"br", 415), (b"Identity", 200)])
async def test_an_encoded_body_is_refused(encoding, expected):
    """A small one may be a huge one when it is unpacked."""
    status, body = await Client().ask(headers=[(b"content-encoding", encoding)])
    assert status == expected
    assert expected == 200 or "Content-Encoding" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("change", ["", "room", "unload"])
async def test_a_request_counts_when_its_body_has_arrived(change):
    """Clients that send slowly take no places; what has changed meanwhile holds."""
    client = Client()
    waiting, arrived = asyncio.Event(), asyncio.Event()
    got: list[Any] = []
    weights: list[int] = []

    async def receive():
        waiting.set()
        await arrived.wait()
        return {"type": "http.request", "body": b'{"prompt": "x"}', "more_body": False}

    async def send(message):
        weights.append(client.ledger.count())
        got.append(message)

    scope = {"type": "http", "path": TEXT, "method": "POST", "headers": []}
    answering = asyncio.ensure_future(client.middleware(scope, receive, send))
    await waiting.wait()
    assert client.ledger.is_empty()
    client.gate.refuses = change
    if change == "unload":
        client.middleware.leave()
    arrived.set()
    await answering
    assert (got[0]["status"], weights[0]) == ((503, 0) if change else (200, 1))
    assert client.ledger.is_empty()


@pytest.mark.parametrize("waits", ["read", "checked"])
async def test_an_unload_refuses_what_has_not_been_passed_on(waits):
    """uvicorn would cancel it, and log a traceback."""
    client = Client()
    waiting = asyncio.Event()
    got: list[Any] = []

    async def receive():
        if waits == "read":
            waiting.set()
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b'{"prompt": "x"}', "more_body": False}

    async def check_text(*args):
        waiting.set()
        await asyncio.Event().wait()

    async def send(message):
        got.append(message)

    client.prompter.check_text = check_text
    scope = {"type": "http", "path": TEXT, "method": "POST", "headers": []}
    answering = asyncio.ensure_future(client.middleware(scope, receive, send))
    await waiting.wait()
    client.middleware.leave()
    await asyncio.sleep(0.01)
    # What counts already has its time.
    assert answering.done() == (waits == "read")
    client.middleware.close()
    await asyncio.wait_for(answering, 5)
    assert got[0]["status"] == 503
    assert b"being unloaded" in got[1]["body"]
    assert client.ledger.is_empty()
    assert client.app.got == []


UNKNOWN = [
    {"functions": [], "best_of": 5, "guided_regex": "((a{100}){100}){100}", "context_management": {"edits": []}},
    {"deep": json.loads("[" * 60 + "]" * 60)},
    {"long": "x" * 2_000_000},
    {"odd \u00e9 name": {"a": [1.5, -0.0, 1e300, 10**18, "\u2028", None]}},
]


@pytest.mark.parametrize("unknown", UNKNOWN, ids=lambda value: str(value)[:40])
async def test_fields_that_vllm_does_not_have_do_not_reach_it(unknown):
    """They are ignored, as vLLM ignores them. All others have their values."""
    client = Client()
    known = {"prompt": "h\u00e9", "temperature": 0.1, "logit_bias": {"1": -1e-7}, "seed": 2**62, "user": "\U0001f600"}
    status, _ = await client.ask(body={**unknown, **known, **unknown})
    assert status == 200
    assert json.loads(client.app.got[0][1]) == known


async def test_a_field_of_a_newer_vllm_reaches_it():
    """On the day on which it has it."""
    client = Client()
    client.application.bodies[TEXT] = BodyType((), frozenset({"prompt", "new"}))
    sent = b'{"prompt": "x", "new": {"a": [1]}}'
    assert (await client.ask(body=sent))[0] == 200
    assert client.app.got[0][1] == sent


async def test_items_of_no_kind_are_refused_before_vllm_has_them():
    """Its answer to thousands would take half a minute."""

    class Strict:
        @staticmethod
        def model_validate(body):
            error: Any = ValueError("wrong")
            error.error_count = lambda: 233 * len(body["input"])
            raise error

    client = Client()
    client.application.bodies["/v1/responses"] = BodyType((Strict,), frozenset({"input"}))
    status, text = await client.ask("/v1/responses", {"input": [{"role": 5}] * 18})
    assert status == 400
    assert json.loads(text)["error"]["message"].startswith("input[16] to input[17] have missing")
    assert client.app.got == []
    assert (await client.ask("/v1/responses", {"input": [{"role": 5}] * 17}))[0] == 200
    assert client.prompter.checked == ["a turn"] * 3


async def test_a_client_that_has_gone_gets_no_answer():
    """Nor does its request reach the application."""
    client = Client()

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        raise AssertionError(message)

    scope = {"type": "http", "path": TEXT, "method": "POST", "headers": []}
    await client.middleware(scope, receive, send)
    assert client.app.got == []
    assert client.ledger.is_empty()


LONG = json.dumps({"prompt": "x"}).encode() + b" " * SHORT
CONSTRAINED = json.dumps({"prompt": "x", "structured_outputs": {"regex": "a+"}}).encode()


@pytest.mark.parametrize("body", [LONG, CONSTRAINED])
async def test_a_client_that_leaves_stops_the_checks_of_its_request(body):
    """Its place is free at once."""
    client = Client()
    checking, left = asyncio.Event(), asyncio.Event()
    waiting = [{"type": "http.request", "body": body, "more_body": False}]
    stopped: list[bool] = []

    async def receive():
        if waiting:
            return waiting.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def slow(*args):
        checking.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(True)

    async def send(message):
        raise AssertionError(message)

    client.prompter.check_text = client.prompter.try_constraint = slow
    scope = {"type": "http", "path": TEXT, "method": "POST", "headers": []}
    answering = asyncio.ensure_future(client.middleware(scope, receive, send))
    await checking.wait()
    assert client.ledger.count() == 1
    left.set()
    await answering
    assert stopped == [True]
    assert client.app.got == []
    assert client.ledger.is_empty()
