"""Clients that are there when a server is told to end, and what a stop does to them.

Each kind of client is a class. It begins in its ``__init__``, ``begun`` says whether it is where the test wants it, and ``close``
ends it. What it got is a word: `FINISHED`, `TOLD`, or whatever else came.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import grpc  # type: ignore[import-untyped]
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2, service_pb2_grpc

from support.model_requests import prompt
from support.open_stream import OpenStream
from support.triton_client import tensor
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT, _ = FACTS[2]
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 60_000, "ignore_eos": True}
"""A request that lasts for minutes."""
SHORT: dict[str, Any] = {**LONG, "max_tokens": 400}
"""A request that may end within the grace period."""
WIDE: dict[str, Any] = {**LONG, "logprobs": 5}
"""A request whose responses fill the buffers of a client that does not read."""
FINISHED = "finished"
TOLD = "UNAVAILABLE"
TOLD_IN_WORDS = "UNAVAILABLE in words, status 400"
"""Triton 24.10's answer to any error that is the whole answer."""
REASONS = ("the model was unloaded before the request had finished", "the model is being unloaded")
SMALL_BUFFER = 4096
"""Of a socket whose owner does not read, bytes."""


def kind_of(error: str, *, short: bool) -> str:
    """Return what a client got, in a word; a long request that ends without an error was cut."""
    if not error:
        return FINISHED if short else "ended early, without an error"
    return TOLD if any(reason in error for reason in REASONS) else error[:200]


def parameters_of(number: int) -> dict[str, Any]:
    """Return a client's sampling parameters; one in eight may finish."""
    return SHORT if number % 8 == 7 else LONG


class _Reader:
    """A client that has sent its request, and a thread that reads the answer with ``_read``."""

    def _begin(self, number: int) -> None:
        self._short = parameters_of(number) is SHORT
        self._got = "nothing"
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        raise NotImplementedError

    def begun(self) -> bool:
        """Return True: the request was sent."""
        return True

    def got(self) -> str:
        """Return what the client got; waits for it."""
        self._thread.join(300)
        return self._got


class GrpcReader(_Reader):
    """Reads the answer of a gRPC stream, on a connection of its own, and then closes the stream.

    With ``codes`` it asks for gRPC's own status.
    """

    def __init__(self, url: str, number: int, *, codes: bool = False) -> None:
        self._codes = codes
        tensors = prompt(PROMPT, parameters_of(number), stream=number % 4 > 0)
        self._stream = OpenStream(url, tensors, codes=codes, own_connection=True)
        self._stream.__enter__()
        self._begin(number)

    def close(self) -> None:
        """Give the request up, if it has not ended."""
        self._stream.__exit__()

    def _read(self) -> None:
        end = self._stream.wait_end()
        self._got = kind_of(end.error, short=self._short)
        if end.error and self._codes and end.status != "StatusCode.UNAVAILABLE":
            self._got = f"{end.status}: {end.error[:200]}"
        self._stream.__exit__()


class HttpReader(_Reader):
    """Reads an answer over HTTP, of Triton's own API or of the OpenAI API, and hangs up; every fourth asks for a whole one."""

    def __init__(self, url: str, number: int, *, openai: bool = False) -> None:
        self._streams = number % 4 > 0
        if openai:
            path = "/v1/completions"
            body = {"model": "vllm", "prompt": PROMPT, "stream": self._streams, **parameters_of(number)}
        else:
            path = f"/v2/models/vllm/generate{'_stream' if self._streams else ''}"
            body = {"text_input": PROMPT, "stream": self._streams, "parameters": parameters_of(number)}
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
        self._connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        self._begin(number)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _read(self) -> None:
        try:
            answer = self._connection.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            self._got = f"{type(error).__name__}: {error}"[:200]
            return
        finally:
            self._connection.close()
        last = ([line for line in text.split("\n") if line and line != "data: [DONE]"] or [""])[-1]
        if not last:
            self._got = f"{answer.status}: an empty answer"
        elif answer.status == 200:
            self._got = kind_of(last if '"error"' in last else "", short=self._short)
        else:
            words = kind_of(text, short=False) == TOLD
            known = {503: TOLD} if self._streams else {503: TOLD, 400: TOLD_IN_WORDS}
            told = known.get(answer.status) if words else None
            self._got = told or f"{answer.status}: {text[:200]}"


class IdleHttp:
    """Keeps an HTTP connection open after an answer, as a client's pool does."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
        self._connection.request("GET", "/v2/health/live")
        self._connection.getresponse().read()

    def begun(self) -> bool:
        """Return whether the connection is still there."""
        return self._connection.sock is not None

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


class IdleGrpc:
    """Keeps a gRPC connection open after an answer."""

    def __init__(self, url: str) -> None:
        self._client: Any = grpcclient.InferenceServerClient(url, channel_args=[("grpc.use_local_subchannel_pool", 1)])
        assert self._client.is_server_live()

    def begun(self) -> bool:
        """Return True: the server has answered."""
        return True

    def close(self) -> None:
        """Hang up."""
        self._client.close()


class OpenGrpc:
    """Keeps a gRPC stream open after its answer, as a client does that sends one request after another."""

    def __init__(self, url: str) -> None:
        self._stream = OpenStream(url, prompt(PROMPT, {**LONG, "max_tokens": 1}), own_connection=True)
        self._stream.__enter__()

    def begun(self) -> bool:
        """Return whether the answer has come."""
        return self._stream.ended

    def close(self) -> None:
        """End the stream."""
        self._stream.__exit__()


class _Deaf:
    """A raw socket with a small buffer that sends a request and never reads."""

    def __init__(self, url: str, request: bytes) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        host, _, port = url.rpartition("//")[2].partition(":")
        self._socket.connect((host, int(port)))
        self._socket.sendall(request)

    def begun(self) -> bool:
        """Return whether the server has bytes to send that find no room here."""
        return unsent(self._socket) > 0

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class DeafHttp(_Deaf):
    """A client of Triton's HTTP API, or of the OpenAI API, that does not read."""

    def __init__(self, url: str, *, openai: bool = False) -> None:
        if openai:
            body = json.dumps({"model": "vllm", "prompt": PROMPT, "stream": True, **WIDE}).encode()
        else:
            body = json.dumps({"text_input": PROMPT, "stream": True, "return_logprobs": True, "parameters": WIDE}).encode()
        path = "/v1/completions" if openai else "/v2/models/vllm/generate_stream"
        head = f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
        super().__init__(url, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


class DeafGrpc(_Deaf):
    """A gRPC client that does not read: HTTP/2 by hand, with a window that never fills, so that TCP's does."""

    def __init__(self, url: str) -> None:
        names = {":method": "POST", ":scheme": "http", ":path": f"/{_SERVICE}/ModelStreamInfer", ":authority": url}
        names |= {"content-type": "application/grpc", "te": "trailers"}
        # HPACK's literals without indexing and without Huffman's code
        fields = b"".join(b"\0" + bytes([len(k)]) + k.encode() + bytes([len(v)]) + v.encode() for k, v in names.items())
        message = wide_request().SerializeToString()
        frames = [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, _WINDOW)),
            _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW - 65_535)),
            _frame(_HEADERS, _END_HEADERS, 1, fields),
            _frame(_DATA, 0, 1, struct.pack(">BI", 0, len(message)) + message),
        ]
        super().__init__(url, b"".join(frames))


_SERVICE = "inference.GRPCInferenceService"
_DATA, _HEADERS, _SETTINGS, _WINDOW_UPDATE = 0, 1, 4, 8
_END_HEADERS = 4
_INITIAL_WINDOW = 4
_WINDOW = (1 << 31) - 1


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


class UnreadGrpc:
    """A client of gRPC's library that never asks for a response: HTTP/2's window fills."""

    def __init__(self, url: str) -> None:
        self._over = threading.Event()
        self._channel = grpc.insecure_channel(url, [("grpc.use_local_subchannel_pool", 1)])
        self._call = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelStreamInfer(self._requests())

    def begun(self) -> bool:
        """Return True: how much the library has taken cannot be seen."""
        return True

    def close(self) -> None:
        """Hang up."""
        self._over.set()
        self._call.cancel()
        self._channel.close()

    def _requests(self) -> Iterator[Any]:
        yield wide_request()
        self._over.wait(600)  # the client's half of the stream stays open


def wide_request() -> Any:
    """Return a request of gRPC's protocol whose responses are wide."""
    request = service_pb2.ModelInferRequest(model_name="vllm")
    for name, value in prompt(PROMPT, WIDE, stream=True, return_logprobs=True).items():
        made = tensor(name, value)
        request.inputs.append(made._get_tensor())
        request.raw_input_contents.append(made._get_content())
    return request


def unsent(connection: socket.socket) -> int:
    """Return how many bytes the other end, on this machine, still has to send to a connection."""
    mine, theirs = connection.getsockname()[1], connection.getpeername()[1]
    for name in ("tcp", "tcp6"):  # gRPC's sockets are of IPv6, whatever address they have
        for line in Path("/proc/net", name).read_text("ascii").splitlines()[1:]:
            fields = line.split()
            ports = [int(fields[place].partition(":")[2], 16) for place in (1, 2)]
            if ports == [theirs, mine]:
                return int(fields[4].partition(":")[0], 16)
    return 0


def close_all(clients: list[Any]) -> None:
    """Close clients, whatever state they are in."""
    for client in clients:
        with contextlib.suppress(Exception):
            client.close()
