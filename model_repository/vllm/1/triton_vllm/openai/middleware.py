"""The ASGI application in front of vLLM's: it refuses a request, or passes on what it checked."""

from __future__ import annotations

import hashlib
import hmac
import json
from contextlib import ExitStack, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import (
    DEAD,
    UNLOADING,
    AdapterError,
    InternalError,
    InvalidRequestError,
    UnavailableError,
)
from triton_vllm.openai.body import SHORT, Bodies, parse
from triton_vllm.openai.checked_engine import JOB
from triton_vllm.openai.contents import check
from triton_vllm.openai.delivery import Collected
from triton_vllm.openai.fields import PROBES, ROUTES
from triton_vllm.openai.interrupt import Gone, Interrupt, ended_with_client
from triton_vllm.openai.items import drop_log_probabilities
from triton_vllm.openai.refusal import HttpRefusalError, body_of, event_of, status_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, MutableMapping

    from triton_vllm.base.protocols import EngineClient
    from triton_vllm.engine.job import Job
    from triton_vllm.openai.checked_engine import Rules
    from triton_vllm.openai.contents import Content
    from triton_vllm.openai.fields import Route
    from triton_vllm.vllm_api import Application

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]

# vLLM's server reads a rank, a priority, a session and the request's id from others. Two requests
# with one id would be stopped together.
_HEADERS = frozenset({
    b"accept", b"access-control-request-headers", b"access-control-request-method",
    b"authorization", b"content-type", b"host", b"origin", b"traceparent", b"tracestate",
    b"user-agent",
})  # fmt: skip
"""The headers that vLLM's application gets."""


class Middleware:
    """Takes each HTTP request of the port.

    Args:
        rules: what a request must pass.
        key: the API key. Empty if there is none.
        note: logs an exception of the application.

    Attributes:
        application: vLLM's application. None before it serves.
        llm: the engine that the application answers with.
        closed: whether the model is being unloaded. ``leave`` sets it.
    """

    def __init__(self, rules: Rules, key: str, note: Callable[[str, Exception], None]) -> None:
        self._rules = rules
        # A digest, so that keys of any length are compared in the same time.
        self._key = hashlib.sha256(key.encode()).digest() if key else b""
        self._note = note
        self._bodies = Bodies(rules.fit.limits)
        # The blocks of requests whose bodies are being read, and are being checked.
        self._reading: set[Interrupt] = set()
        self._checking: set[Interrupt] = set()
        self.application: Application | None = None
        self.llm: EngineClient | None = None
        self.closed = False

    def leave(self) -> None:
        """Take no more requests, and refuse those whose bodies have not arrived."""
        self.closed = True
        _end_all(self._reading)

    def close(self) -> None:
        """Refuse all requests that have not been passed on."""
        self.leave()
        _end_all(self._checking)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        # The server is started without the other kinds, lifespan and websocket.
        if scope["type"] != "http":
            return
        try:
            await self._answer(scope, receive, send)
        except Gone:
            # Nobody reads an answer.
            return
        except AdapterError as error:
            self._rules.refusals.note(error)
            await _refuse(send, error, scope["path"])
        # uvicorn would log each one with its traceback.
        except Exception as error:  # noqa: BLE001 - a request must never take the model down
            self._note("a request to the OpenAI port was not checked", error)
            failed = InternalError(
                "the request could not be checked; the server's log has the details"
            )
            self._rules.refusals.note(failed)
            await _refuse(send, failed, scope["path"])

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        """Check a request, and let vLLM's application answer it.

        Raises:
            AdapterError: the request is refused.
            Gone: the client has left.
        """
        # 1) Requests without a key
        route = self._route(scope)
        method = scope["method"]
        path = scope["path"]
        if path in PROBES and method == "GET":
            is_up = self._rules.jobs.is_up() and not self.closed
            await _send(send, HTTPStatus.OK if is_up else HTTPStatus.SERVICE_UNAVAILABLE, b"")
            return
        # A browser asks without a key whether it may ask.
        if method == "OPTIONS":
            await self._pass_on(scope, _messages(b""), receive, send)
            return
        if method != route.method:
            raise HttpRefusalError(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes {route.method}")
        # 2) Requests without a body
        headers = dict(scope["headers"])
        self._check_key(headers)
        if self.closed:
            raise UnavailableError(UNLOADING)
        if method == "GET":
            await self._pass_on(scope, _messages(b""), receive, send)
            return
        # 3) Requests with a body. A full model refuses them before it reads anything.
        _check_encoding(headers)
        self._require_admission()
        with ExitStack() as until_answered:
            job, unread = await self._read(path, headers, receive, until_answered)
            # The job may have been ended while its body was being checked.
            if job.error is not None:
                raise job.error
            # The application's tasks inherit the job.
            JOB.set(job)
            await self._pass_on(scope, unread, receive, send)
            # vLLM's application has answered with this error. It must be counted.
            refused = job.error or job.refused
            if refused is not None:
                self._rules.refusals.note(refused)

    async def _read(
        self,
        path: str,
        headers: Mapping[bytes, bytes],
        receive: Receive,
        until_answered: ExitStack,
    ) -> tuple[Job[Collected], list[Message]]:
        """Read and check a request.

        Args:
            path: the request's path.
            headers: its headers.
            receive: returns the next message of ASGI.
            until_answered: ends the job when the request is answered.

        Returns:
            The request's job, and its body as the messages that the application receives. Nothing
            else holds the body: an answer may take an hour.

        Raises:
            AdapterError: the request is refused.
            Gone: the client has left.
        """
        jobs = self._rules.jobs
        with ExitStack() as until_passed_on:
            # 1) Read the body.
            with Interrupt(self._reading) as interrupt:
                declared = _declared_length(headers)
                body = await self._bodies.read(receive, declared, interrupt, until_passed_on)
            # 2) Count the request. Before its body has arrived, it takes no place: clients that
            # send slowly would otherwise keep others out, also those of Triton.
            self._require_admission()
            job = jobs.begin(Collected(self._rules.vllm, jobs.note_output))
            until_answered.callback(jobs.finish, job)
            # 3) Check the body.
            with Interrupt(self._checking) as interrupt:
                body, content = self._check_body(path, body)
                # A task that waits for the client to leave costs more than a short check.
                may_take_long = len(body) > SHORT or content.constraint is not None
                if may_take_long:
                    async with ended_with_client(receive, interrupt):
                        await self._check_with_engine(content, job)
                else:
                    await self._check_with_engine(content, job)
        return job, _messages(body)

    def _require_admission(self) -> None:
        if self.closed:
            raise UnavailableError(UNLOADING)
        self._rules.fit.gate.let_in()

    def _check_body(self, path: str, read: bytes) -> tuple[bytes, Content]:
        """Return the body as vLLM may read it, and the content that is still to be checked.

        Raises:
            AdapterError: the body is refused, or the model does not have this path.
        """
        rules = self._rules
        if self.application is None:
            raise UnavailableError(DEAD)
        body = parse(rules.fit.limits, read, rules.fit.facts)
        kind = self.application.bodies.get(path)
        if kind is None:
            raise HttpRefusalError(HTTPStatus.NOT_FOUND, "this model has no such path")
        # vLLM would keep these fields next to its own, and ignores them.
        known = {name: value for name, value in body.items() if name in kind.fields}
        has_changed = drop_log_probabilities(known.get("input")) or len(known) < len(body)
        # An unchanged body is passed on as it came: writing costs as much as parsing.
        if has_changed:
            read = json.dumps(known, ensure_ascii=False, separators=(",", ":")).encode()
        return read, check(ROUTES[path], kind, known, rules.fit)

    async def _check_with_engine(self, content: Content, job: Job[Collected]) -> None:
        """Check what needs the engine or takes long, and note the adapter in the job.

        Raises:
            AdapterError: the request is refused.
        """
        rules = self._rules
        llm = self.llm
        application = self.application
        if llm is None or application is None:
            raise UnavailableError(DEAD)
        for listed in content.lists:
            await listed.check(rules.prompter.take_turn)
        for text in content.texts:
            await rules.prompter.check_text(llm, text, rules.fit.facts.max_tokens)
        if content.messages:
            await rules.prompter.check_videos(content.messages)
        if content.constraint is not None:
            await rules.prompter.try_constraint(llm, content.constraint)
        job.adapter = await rules.adapter(llm, content.model)
        # The application must know the adapter's name before it looks it up.
        if job.adapter is not None:
            application.add_adapter(content.model)

    def _route(self, scope: Message) -> Route:
        path = scope["path"]
        # A path with escapes or doubled slashes is another text, and not one of the list.
        route = ROUTES.get(path)
        if route is None or scope.get("raw_path", path.encode()) != path.encode():
            raise HttpRefusalError(HTTPStatus.NOT_FOUND, "there is no such path")
        return route

    def _check_key(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a request without the API key, if there is one."""
        # vLLM's server asks for the key only below some prefixes.
        if not self._key:
            return
        given = headers.get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        digest = hashlib.sha256(key).digest()
        if scheme.lower() != b"bearer" or not hmac.compare_digest(digest, self._key):
            raise HttpRefusalError(HTTPStatus.UNAUTHORIZED, "Authorization: Bearer KEY is missing")

    async def _pass_on(
        self, scope: Message, unread: list[Message], receive: Receive, send: Send
    ) -> None:
        """Let vLLM's application answer a request.

        Args:
            scope: the request of ASGI.
            unread: messages with the body. The application gets them before those of ``receive``.
            receive: returns the next message of ASGI: the client has left.
            send: sends a message of ASGI to the client.
        """
        if self.application is None:
            raise UnavailableError(DEAD)
        headers = [(name, value) for name, value in scope["headers"] if name in _HEADERS]
        length = sum(len(message["body"]) for message in unread)
        headers.append((b"content-length", str(length).encode()))
        passed = {**scope, "headers": headers, "query_string": b""}

        async def received() -> Message:
            return unread.pop() if unread else await receive()

        try:
            await self.application.app(passed, received, send)
        # vLLM's handlers have answered all that they know, except in a stream of responses. A
        # client could fill the log with the tracebacks of the others.
        except Exception as error:  # noqa: BLE001
            await self._answer_failed(scope["path"], error, send)

    async def _answer_failed(self, path: str, error: Exception, send: Send) -> None:
        """Answer with the error for an exception of the application, and note it in the job."""
        # Starlette wraps an exception for which vLLM has a handler if the response has begun.
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        failed: AdapterError
        if isinstance(error, self._rules.vllm.refusals):
            failed = InvalidRequestError(str(error))
        elif isinstance(error, self._rules.vllm.busy_errors):
            failed = UnavailableError(str(error))
        else:
            self._note("vLLM's application failed", error)
            failed = InternalError(
                "the request failed in vLLM's server; the server's log has the details"
            )
        job = JOB.get()
        if job is not None:
            job.refused = job.refused or failed
        try:
            await _refuse(send, failed, path)
        # The application had begun to answer, and uvicorn takes no second start of a response.
        # Noting the first one would cost time for each token. If the answer is no stream, uvicorn
        # takes no event either, and closes the connection. The client then sees that something is
        # missing.
        except RuntimeError:
            with suppress(RuntimeError):
                await send({"type": "http.response.body", "body": event_of(failed, path)})


def _messages(body: bytes) -> list[Message]:
    return [{"type": "http.request", "body": body, "more_body": False}]


def _end_all(blocks: set[Interrupt]) -> None:
    for block in [*blocks]:
        block.end(UnavailableError(UNLOADING))


def _check_encoding(headers: Mapping[bytes, bytes]) -> None:
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding.lower() != b"identity":
        raise HttpRefusalError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "bodies with a Content-Encoding are not taken; send the body as it is",
        )


def _declared_length(headers: Mapping[bytes, bytes]) -> int | None:
    """Return the body's length by its header; None without a valid one."""
    value = headers.get(b"content-length", b"")
    return int(value) if value.isdigit() and len(value) < 20 else None


async def _refuse(send: Send, error: AdapterError, path: str) -> None:
    await _send(send, status_of(error), body_of(error, path))


async def _send(send: Send, status: int, body: bytes) -> None:
    """Send a whole response; a body is JSON."""
    headers = [(b"content-length", str(len(body)).encode())]
    if body:
        headers.append((b"content-type", b"application/json"))
    # The rest of a slow body may never come.
    if status == HTTPStatus.REQUEST_TIMEOUT:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": body})
