"""A client for ModelStreamInfer over a raw HTTP/2 connection in asyncio.

grpc.aio needs 50 to 100 us of a core for each received message. On two cores, that would measure
the load generator. This reader costs about as much as the HTTP/1.1 one, so all targets get the same
load.

It implements only the parts of HTTP/2 (RFC 9113) and of gRPC's framing that a client of a trusted
server needs. It does not decode headers, and its flow-control windows never run out.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections import defaultdict
from typing import TYPE_CHECKING, cast

from tritonclient.grpc import service_pb2

from harness.shapes import count_tokens

if TYPE_CHECKING:
    from loadtest.record import Record, Request

# Frame types of HTTP/2 (RFC 9113, 6).
_DATA = 0
_HEADERS = 1
_RESET = 3
_SETTINGS = 4
_PING = 6
_GOAWAY = 7
_WINDOW_UPDATE = 8
# Flags. The first two have the same value, and belong to different types.
_ACK = 1
_END_STREAM = 1
_END_HEADERS = 4
# Bytes that a peer may send before the receiver extends its window (RFC 9113, 6.9).
_LARGEST_WINDOW = (1 << 31) - 1
_DEFAULT_WINDOW = (1 << 16) - 1
# Bytes received before the windows are extended again: rarely, and long before they run out.
_REPLENISH = 1 << 24


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame of HTTP/2; ``kind`` is its type. Stream 0 is the connection."""
    # The length has three bytes, so the highest one of the four is left out.
    head = struct.pack(">IBBI", len(payload), kind, flags, stream)[1:]
    return head + payload


def _header(name: str, value: str) -> bytes:
    """Encode one header as a literal without an index and without Huffman (RFC 7541, 6.2.2)."""
    # A length of 127 or more would take several bytes. No header here is so long.
    parts = (b"\x00", bytes([len(name)]), name.encode(), bytes([len(value)]), value.encode())
    return b"".join(parts)


class GrpcError(Exception):
    """The server ended a stream, or answered a request with an error."""


class GrpcConnection(asyncio.Protocol):
    """One HTTP/2 connection for any number of ModelStreamInfer streams."""

    def __init__(self) -> None:
        """Set up the connection's state; ``open`` makes a connection and connects it."""
        self._transport: asyncio.WriteTransport | None = None
        self._buffer = bytearray()
        # By stream: its complete messages (None at its end), and the bytes of the next message.
        self._streams: dict[int, asyncio.Queue[bytes | None]] = {}
        self._partial: dict[int, bytearray] = {}
        # By stream: bytes since its window was extended. 0 is the connection.
        self._received: dict[int, int] = defaultdict(int)
        # The number of the next stream.
        self._next = 1

    @classmethod
    async def open(cls, port: int) -> GrpcConnection:
        """Connect to the gRPC port of a server on this machine."""
        _, protocol = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the preface of HTTP/2, and set the flow-control windows to their largest size."""
        # uvloop's transport has the same methods, but is not a subclass.
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
        """Handle the frames that are complete now; the rest of the bytes waits in the buffer."""
        buffer = self._buffer
        buffer += data
        start = 0
        # A frame has nine bytes in front: the payload's length, the type, flags and the stream.
        while start + 9 <= len(buffer):
            # The length has three bytes, for which struct has no format: one byte and two.
            high, low, kind, flags, stream = struct.unpack_from(">BHBBI", buffer, start)
            body = start + 9
            end = body + (high << 16) + low
            if end > len(buffer):
                break
            # The highest bit of the stream's number is reserved, and must be ignored.
            self._handle_frame(kind, flags, stream & 0x7FFFFFFF, bytes(buffer[body:end]))
            start = end
        # Once for all frames, because it moves the rest of the buffer.
        del buffer[:start]

    def _handle_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Handle one frame: answer it, or pass its messages or its end to the stream's queue.

        Frames of other types are ignored.
        """
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
        # The server is about to close the connection.
        elif kind == _GOAWAY:
            self.connection_lost(None)

    def _take_data(self, stream: int, payload: bytes) -> None:
        """Cut gRPC messages out of a stream's bytes: each has a flag and its length in front."""
        partial = self._partial[stream]
        partial += payload
        while len(partial) >= 5:
            size = int.from_bytes(partial[1:5], "big")
            if len(partial) < 5 + size:
                return
            self._streams[stream].put_nowait(bytes(partial[5 : 5 + size]))
            del partial[: 5 + size]

    def _replenish(self, stream: int, size: int) -> None:
        """Count received bytes, and extend the window of the stream before it runs out."""
        self._received[stream] += size
        if self._received[stream] > _REPLENISH:
            received = struct.pack(">I", self._received.pop(stream))
            self.write(_frame(_WINDOW_UPDATE, 0, stream, received))

    def write(self, data: bytes) -> None:
        """Send bytes. The requests are small, so asyncio's buffer is enough flow control."""
        if self._transport is None:
            raise GrpcError("the connection is closed")
        self._transport.write(data)

    def start_stream(self, method: str) -> tuple[int, asyncio.Queue[bytes | None]]:
        """Start a call of ``method``; return the stream's number and the queue of its messages.

        A None in the queue means that the stream has ended.
        """
        stream = self._next
        # A client's streams have odd numbers (RFC 9113, 5.1.1).
        self._next += 2
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._streams[stream] = queue
        self._partial[stream] = bytearray()
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
        # 16384 bytes are the largest payload that every peer must accept (RFC 9113, 4.2).
        for at in range(0, len(body), 16384):
            self.write(_frame(_DATA, 0, stream, body[at : at + 16384]))

    def end(self, stream: int) -> None:
        """Close the sending side of a stream."""
        self.write(_frame(_DATA, _END_STREAM, stream))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


def build_request(model: str, request: Request) -> bytes:
    """Return a serialised ModelInferRequest with the official backend's tensors."""
    sampling = json.dumps(dict(request.parameters))
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, text in (("text_input", request.prompt), ("sampling_parameters", sampling)):
        message.inputs.add(name=name, datatype="BYTES", shape=[1])
        data = text.encode()
        # An element of type BYTES has its length in front, four bytes.
        message.raw_input_contents.append(struct.pack("<I", len(data)) + data)
    for name, flag in (("stream", request.stream), ("exclude_input_in_output", True)):
        message.inputs.add(name=name, datatype="BOOL", shape=[1])
        message.raw_input_contents.append(bytes((flag,)))
    message.outputs.add(name="text_output")
    # The server then marks the last response, even if it has no text.
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    serialised: bytes = message.SerializeToString()
    return serialised


class TritonGrpcClient:
    """A client with one ModelStreamInfer stream, which stays open between requests."""

    def __init__(self, connection: GrpcConnection, model: str) -> None:
        self._connection = connection
        self._model = model
        # tritonclient keeps its stream open, too.
        method = "/inference.GRPCInferenceService/ModelStreamInfer"
        self._stream, self._queue = connection.start_stream(method)

    async def ask(self, request: Request, record: Record) -> None:
        """Send the request, and add each piece with its number of tokens to the record.

        Raises:
            GrpcError: the server answers with an error, or ends the stream.
        """
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
                text = response.raw_output_contents[0][4:].decode()
                record.add((text,), count_tokens(text))
            if response.parameters["triton_final_response"].bool_param:
                return

    async def close(self) -> None:
        """See ``load.Client``."""
        self._connection.end(self._stream)
