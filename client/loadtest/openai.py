"""Send requests to vLLM's own server: completions, and chat for messages.

It needs aiohttp, which ``vllm bench serve`` uses, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from typing import TYPE_CHECKING, Any

import aiohttp

from loadtest.endpoint import PREFLIGHT_SECONDS, Readiness
from loadtest.errors import ClientError, InputError, NoSuchModelError
from loadtest.record import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from loadtest.endpoint import Endpoint
    from loadtest.record import Record, Request

# vLLM's server closes a connection that was idle for 5 s. A request that is sent at this moment
# would be lost.
_KEEP_ALIVE_SECONDS = 4.0
# The name that OpenAI's own client and `vllm bench serve` read, too.
_KEY_VARIABLE = "OPENAI_API_KEY"
# Bytes of an error page in a message.
_MOST_BYTES = 500
_EMPTY = "the answer has no completion; see the server's log"


class OpenAIClient:
    """A client for any number of requests at a time; see ``endpoint.Backend``."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._scheme = "https" if endpoint.tls.get("ssl") else "http"
        self._session: Any = None
        self._ready = Readiness(self._require_ready, endpoint.reconnect)
        self._model = endpoint.model

    async def __aenter__(self) -> OpenAIClient:  # noqa: PYI034 - Self is not in Python 3.10
        """Open the session. It connects with the first request."""
        self._session = aiohttp.ClientSession(
            # The load limits the requests in flight.
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS, ssl=self._tls()
            ),
            timeout=aiohttp.ClientTimeout(total=self._endpoint.stream_timeout),
            headers=self._headers(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections, and cancel what still runs."""
        await self._session.close()

    def stop(self) -> None:
        """See ``endpoint.Backend``."""
        self._ready.stopping = True

    def _headers(self) -> dict[str, str]:
        """Return the headers of each request.

        Raises:
            InputError: the key in the environment cannot be sent.
        """
        headers = {"content-type": "application/json"}
        if key := os.environ.get(_KEY_VARIABLE, "").strip():
            # The message must not show the key.
            if not (key.isascii() and key.isprintable()):
                raise InputError(
                    f"{_KEY_VARIABLE} has a character that no HTTP header can have; "
                    "set it to the server's key, or unset it"
                )
            headers["authorization"] = f"Bearer {key}"
        # If --header has a key, too, it replaces this one.
        return headers | dict(self._endpoint.headers)

    def _tls(self) -> ssl.SSLContext | bool:
        """Return aiohttp's value for TLS. Without ``--ssl`` it is True, the default.

        Raises:
            ClientError: a certificate or the key cannot be read.
        """
        files = self._endpoint.tls
        if not files.get("ssl"):
            return True
        try:
            context = ssl.create_default_context(cafile=files.get("root_certificates"))
            if "certificate_chain" in files:
                context.load_cert_chain(files["certificate_chain"], files["private_key"])
        # An ssl.SSLError is an OSError, too.
        except OSError as error:
            raise ClientError(
                f"cannot read the certificates: {error.strerror or error}; name PEM files with "
                "--root-certificates, --private-key and --certificate-chain"
            ) from error
        return context

    def _url(self, path: str) -> str:
        return f"{self._scheme}://{self._endpoint.url}{path}"

    # --- before the first request ---------------------------------------------------------------

    async def require_model(self, inputs: Iterable[str]) -> None:
        """See ``endpoint.Backend``.

        Raises:
            InputError: a prompt has pictures outside of its messages.
            ClientError: there is no such server or no such model.
        """
        if "image" in inputs:
            raise InputError(
                "--backend openai takes pictures as image_url in messages only; "
                "write them there, and leave out images"
            )
        await self._ready.wait(self._endpoint.wait_ready)

    async def connect(self, connections: int) -> None:
        """See ``endpoint.Backend``."""
        # They are sent at the same time, so that each opens a connection of its own.
        checks = (self._require_ready() for _ in range(connections))
        for problem in await asyncio.gather(*checks, return_exceptions=True):
            # If the server is gone, the next requests fail and are counted.
            if problem and not isinstance(problem, ClientError):
                raise problem

    @property
    def model(self) -> str:
        """See ``endpoint.Backend``."""
        return self._model

    @property
    def counts_tokens(self) -> bool:
        """See ``endpoint.Backend``; vLLM's server does, and others are known after an answer."""
        return True

    async def _require_ready(self) -> None:
        """Check that the server lists the model. If none is asked for, take the first one.

        Raises:
            NoSuchModelError: it lists other models only.
            ClientError: it does not answer, or not as an OpenAI server does.
        """
        where = f"{self._endpoint.url} (--url)"
        limit = aiohttp.ClientTimeout(total=PREFLIGHT_SECONDS)
        try:
            # A redirect would send the headers, perhaps a key, to another host.
            async with self._session.get(
                self._url("/v1/models"), timeout=limit, allow_redirects=False
            ) as response:
                body = await response.read()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise ClientError(
                f"no OpenAI server answers at {where}: {error or 'no answer'}; start vLLM's "
                "server, and name its port (8000 by default)"
            ) from error
        if 300 <= response.status < 400:
            target = response.headers.get("location", "another place")
            raise ClientError(
                f"the server at {where} redirects /v1/models to {target}; "
                "name the server that answers"
            )
        if response.status != 200:
            raise ClientError(
                f"the server at {where} answers /v1/models with status {response.status}: "
                f"{_reason(body)}; name vLLM's server, or give its key in {_KEY_VARIABLE}, "
                "and what else it asks for with --header"
            )
        try:
            names = _model_names(json.loads(body))
        except (ValueError, TypeError, KeyError) as error:
            raise ClientError(
                f"the server at {where} does not list its models under /v1/models; "
                "name vLLM's server"
            ) from error
        if not names:
            raise ClientError(
                f"the server at {where} lists no model; wait for it to load (--wait-ready 300), "
                "or see the server's log"
            )
        self._model = self._model or names[0]
        # vLLM's server answers after its model is loaded, so the list is complete.
        if self._model not in names:
            raise NoSuchModelError(
                f"the server at {where} has no model {self._model!r}, but {', '.join(names)}; "
                "name one of them with --model"
            )

    # --- one request ----------------------------------------------------------------------------

    async def ask(self, request: Request, record: Record) -> None:
        """See ``loops.Client``.

        Raises:
            ServerGoneError: the server has not come back.
        """
        path = "/v1/chat/completions" if request.is_chat else "/v1/completions"
        try:
            # No redirects, as in _require_ready.
            async with self._session.post(
                self._url(path), data=self._body(request), allow_redirects=False
            ) as response:
                if response.status != 200:
                    reason = _reason(await response.read())
                    record.fail(f"status {response.status}", reason)
                elif request.stream:
                    await self._read_stream(response, record)
                else:
                    self._add_answer(json.loads(await response.read()), record)
        except asyncio.TimeoutError:
            limit = self._endpoint.stream_timeout
            record.fail("timeout", f"no complete answer within {limit} s (--stream-timeout)")
        except aiohttp.ClientError as error:
            lost = str(error) or type(error).__name__
            record.fail("connection", f"the connection to {self._endpoint.url} was lost: {lost}")
            await self._ready.wait_again()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            record.fail("wrong answer", f"the answer is not that of an OpenAI server: {error!r}")

    def _body(self, request: Request) -> bytes:
        """Return the body of a request, as JSON."""
        # The parameters come first, so that those of a prompt replace none of the fields below.
        body = dict(request.parameters)
        body |= {"model": self._model, "stream": request.stream}
        if request.is_chat:
            body["messages"] = json.loads(request.prompt)
        else:
            body["prompt"] = request.prompt
        if request.stream:
            # As `vllm bench serve` does. With continuous_usage_stats, each piece would have a count
            # of tokens, and the server would do more than it does for others.
            body["stream_options"] = {"include_usage": True}
        # vLLM's server takes the name of an adapter for that of a model.
        if adapter := body.pop("lora_name", None):
            body["model"] = adapter
        return json.dumps(body).encode()

    async def _read_stream(self, response: aiohttp.ClientResponse, record: Record) -> None:
        """Add the pieces of a streamed answer to the record, until it ends or has an outcome.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: no OpenAI server sends this.
        """
        stream = _Stream(record)
        rest = b""
        # Read on after [DONE]: aiohttp closes the connection of an answer that was not read to its
        # end, and the next request would have to connect again.
        async for data in response.content.iter_any():
            # A piece of data may end within a line.
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                stream.add(line)
                # The server stops working on an answer whose connection is closed.
                if record.outcome is not None:
                    return
        # `rest` follows the last line break. Unless it is [DONE], a part of it may be missing.
        if rest[5:].strip() == b"[DONE]":
            stream.add(rest)
        if not stream.done:
            reason = "the stream ended without [DONE]; see the server's log"
            record.fail("no complete answer", reason)
        elif not record.times:
            record.fail("no response", _EMPTY)
        else:
            record.finish_reasons = stream.finish_reasons

    def _add_answer(self, answer: Mapping[str, Any], record: Record) -> None:
        """Add a whole answer to the record.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: no OpenAI server sends this.
        """
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        if not choices:
            record.fail("no response", _EMPTY)
            return
        # An answer without text is one piece, too.
        record.add_piece([_text(choice) for choice in choices])
        record.finish_reasons = tuple(choice.get("finish_reason") or "" for choice in choices)
        _count(answer.get("usage"), record)


class _Stream:
    """What the lines of a stream say.

    Attributes:
        done: whether the server has said that the answer is complete.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._reasons: dict[int, str] = {}
        self.done = False

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Return why each completion ended, as far as the server has said so."""
        return tuple(self._reasons[index] for index in sorted(self._reasons))

    def add(self, line: bytes) -> None:
        """Note a line. If it ends the request early, the record has an outcome.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: no OpenAI server sends this.
        """
        # Lines that do not begin so are comments.
        if self.done or not line.startswith(b"data:"):
            return
        event = line[5:].strip()
        if event == b"[DONE]":
            self.done = True
            return
        chunk = json.loads(event)
        if error := chunk.get("error"):
            self._record.fail("error from the model", _message(error))
            return
        for choice in chunk.get("choices") or ():
            _add_piece(choice, self._record, self._reasons)
        # The last one has the sum, and no choices.
        _count(chunk.get("usage"), self._record)
        limit = self._record.request.cancel_after
        if limit is not None and len(self._record.times) >= limit:
            self._record.outcome = Outcome.CANCELLED


def _add_piece(choice: Mapping[str, Any], record: Record, reasons: dict[int, str]) -> None:
    """Add a piece of a stream to the record.

    vLLM sends a piece for each step in which it has made tokens, also if they have no text. Only
    the first piece of a chat, which names the role, has no token.
    """
    index = choice.get("index", 0)
    if reason := choice.get("finish_reason"):
        reasons[index] = reason
    text = _text(choice)
    is_role = not text and not reason and "role" in (choice.get("delta") or ())
    if not is_role:
        # The completions before this one get no text.
        record.add_piece([*[""] * index, text])


def _text(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice of any kind: of a stream or whole, of a chat or a completion."""
    part = choice.get("delta") or choice.get("message") or {}
    text: str | None = part.get("content") if part else choice.get("text")
    return text or ""


def _count(usage: Mapping[str, Any] | None, record: Record) -> None:
    """Note the numbers of tokens, if the server has counted them."""
    if not usage:
        return
    prompt_tokens = usage.get("prompt_tokens")
    record.input_tokens = None if prompt_tokens is None else int(prompt_tokens)
    completion_tokens = usage.get("completion_tokens")
    if completion_tokens is not None:
        record.output_tokens = int(completion_tokens)


def _model_names(answer: Mapping[str, Any]) -> list[str]:
    names = [model["id"] for model in answer["data"]]
    if not all(isinstance(name, str) for name in names):
        raise TypeError("a model's id is not a string")
    return names


def _reason(body: bytes) -> str:
    """Return what an error page says."""
    try:
        found = json.loads(body)
        # vLLM 0.11 and newer have the error in an object of its own.
        return _message(found.get("error", found))
    except (ValueError, AttributeError):
        return body[:_MOST_BYTES].decode("utf-8", errors="replace").strip()


def _message(error: Any) -> str:
    text = error.get("message") if isinstance(error, dict) else error
    return str(text or error)[:_MOST_BYTES]
