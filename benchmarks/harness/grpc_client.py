"""A client for ModelStreamInfer over a raw HTTP/2 connection in asyncio.

grpc.aio needs 50-100 us of a core for each received message. On two cores, that would measure the load generator. This
reader costs about as much as the HTTP/1.1 one, so all targets get the same load.

It implements only the parts of HTTP/2 (RFC 9113) and gRPC's framing that a client of a trusted server needs. It does not
decode headers, and its flow-control windows never run out.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import TYPE_CHECKING, cast

from tritonclient.grpc import service_pb2

if TYPE_CHECKING:
    from harness.load import Request
    from harness.metrics import Answer

# Frame types, flags and the window sizes of HTTP/2 (RFC 9113, 6 and 6.9).
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_LARGEST_WINDOW = (1 << 31) - 1
_DEFAULT_WINDOW = (1 << 16) - 1
_REPLENISH = 1 << 24  # bytes received before the windows are extended again


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes((kind, flags))
        + struct.pack(">I", stream)
        + payload
    )


def _header(name: str, value: str) -> bytes:
    """Encode one header as literal, not indexed, without Huffman (RFC 7541, 6.2.2); both parts are under 127 bytes."""
    return b"\x00" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()


class GrpcError(Exception):
    """The server ended a stream, or answered a request with an error."""


class GrpcConnection(asyncio.Protocol):
    """One HTTP/2 connection for any number of ModelStreamInfer streams."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._buffer = bytearray()
        self._streams: dict[int, asyncio.Queue[bytes | None]] = {}
        self._partial: dict[int, bytearray] = {}
        self._received: dict[int, int] = {}
        self._next = 1

    @classmethod
    async def open(cls, port: int) -> GrpcConnection:
        """Connect to the gRPC port of a server on this machine."""
        _, protocol = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the preface and set the windows to their largest size."""
        # Uvloop's transport has the same methods, but is not a subclass.
        self._transport = cast("asyncio.WriteTransport", transport)
        # 4 is SETTINGS_INITIAL_WINDOW_SIZE, the window of each stream (RFC 9113, 6.5.2).
        settings = struct.pack(">HI", 4, _LARGEST_WINDOW)
        widen = struct.pack(">I", _LARGEST_WINDOW - _DEFAULT_WINDOW)
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        self._transport.write(
            preface + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, widen)
        )

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Wake all waiting streams."""
        for queue in self._streams.values():
            queue.put_nowait(None)

    def data_received(self, data: bytes) -> None:
        """Take complete frames off the buffer."""
        buffer = self._buffer
        buffer += data
        at, end = 0, len(buffer)
        while end - at >= 9:
            size = int.from_bytes(buffer[at : at + 3], "big")
            if end - at - 9 < size:
                break
            stream = int.from_bytes(buffer[at + 5 : at + 9], "big") & _LARGEST_WINDOW
            self._take(
                buffer[at + 3], buffer[at + 4], stream, bytes(buffer[at + 9 : at + 9 + size])
            )
            at += 9 + size
        del buffer[:at]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._take_data(stream, payload)
            # The connection (number 0) and each stream have a window of their own.
            self._replenish(0, len(payload))
            self._replenish(stream, len(payload))
        elif kind == _SETTINGS and not flags & _ACK:
            self.write(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self.write(_frame(_PING, _ACK, 0, payload))
        # The last headers of a stream carry gRPC's status, which is not decoded.
        elif kind == _RESET or (kind == _HEADERS and flags & _END_STREAM):
            if stream in self._streams:
                self._streams[stream].put_nowait(None)
        elif kind == _GOAWAY:
            self.connection_lost(None)

    def _take_data(self, stream: int, payload: bytes) -> None:
        """Cut gRPC messages (flag, length, message) out of a stream's bytes."""
        partial = self._partial[stream]
        partial += payload
        while len(partial) >= 5:
            size = int.from_bytes(partial[1:5], "big")
            if len(partial) < 5 + size:
                return
            self._streams[stream].put_nowait(bytes(partial[5 : 5 + size]))
            del partial[: 5 + size]

    def _replenish(self, stream: int, size: int) -> None:
        received = self._received.get(stream, 0) + size
        if received > _REPLENISH:
            self.write(_frame(_WINDOW_UPDATE, 0, stream, struct.pack(">I", received)))
            received = 0
        self._received[stream] = received

    def write(self, data: bytes) -> None:
        """Send bytes. The requests are small, so asyncio's buffer is enough flow control."""
        if self._transport is None:
            raise GrpcError("the connection is closed")
        self._transport.write(data)

    def start_stream(self, method: str) -> tuple[int, asyncio.Queue[bytes | None]]:
        """Start a call of ``method``; return the stream's number and the queue for its messages."""
        # A client's streams have odd numbers (RFC 9113, 5.1.1).
        stream, self._next = self._next, self._next + 2
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._streams[stream], self._partial[stream] = queue, bytearray()
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "127.0.0.1",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        block = b"".join(_header(name, value) for name, value in headers.items())
        self.write(_frame(_HEADERS, _END_HEADERS, stream, block))
        return stream, queue

    def send(self, stream: int, message: bytes) -> None:
        """Send one gRPC message without compression."""
        body = b"\x00" + struct.pack(">I", len(message)) + message
        for at in range(0, len(body), 16384):  # the largest frame that every peer must accept
            self.write(_frame(_DATA, 0, stream, body[at : at + 16384]))

    def end(self, stream: int) -> None:
        """Close the sending side of a stream."""
        self.write(_frame(_DATA, _END_STREAM, stream))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


def build_request(model: str, asked: Request) -> bytes:
    """Return a serialised ModelInferRequest with the official backend's tensors."""
    sampling = json.dumps({"max_tokens": asked.answer_tokens, "ignore_eos": True, "temperature": 0})
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, data in (("text_input", asked.prompt), ("sampling_parameters", sampling)):
        request.inputs.add(name=name, datatype="BYTES", shape=[1])
        # An element of type BYTES has its length in front, four bytes.
        request.raw_input_contents.append(struct.pack("<I", len(data)) + data.encode())
    for name, flag in (("stream", asked.stream), ("exclude_input_in_output", True)):
        request.inputs.add(name=name, datatype="BOOL", shape=[1])
        request.raw_input_contents.append(bytes((flag,)))
    request.outputs.add(name="text_output")
    # Then the last response is marked even if it has no text.
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    serialised: bytes = request.SerializeToString()
    return serialised


class TritonGrpcClient:
    """A client with one ModelStreamInfer stream, which stays open between requests as tritonclient's does."""

    def __init__(self, connection: GrpcConnection, model: str) -> None:
        self._connection, self._model = connection, model
        self._stream, self._queue = connection.start_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer"
        )

    async def ask(self, request: Request, answer: Answer) -> None:
        """See ``load.Client``."""
        self._connection.send(self._stream, build_request(self._model, request))
        while True:
            message = await self._queue.get()
            if message is None:
                raise GrpcError("the server ended the stream")
            reply = service_pb2.ModelStreamInferResponse.FromString(message)
            if reply.error_message:
                raise GrpcError(reply.error_message)
            response = reply.infer_response
            if response.raw_output_contents:
                # The first four bytes are the text's length.
                answer.add(response.raw_output_contents[0][4:].decode())
            if response.parameters["triton_final_response"].bool_param:
                return

    async def close(self) -> None:
        """See ``load.Client``."""
        self._connection.end(self._stream)
