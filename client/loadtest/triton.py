"""Send requests to a Triton model over gRPC.

Each request has a stream of its own, and all streams share one channel. An error in a stream does
not name its request. With one stream for all prompts, it would be unknown which prompt failed.
"""

from __future__ import annotations

import asyncio
import json
import struct
import time
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]  # grpcio publishes no types
import numpy as np
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from loadtest.endpoint import PREFLIGHT_SECONDS, Readiness
from loadtest.errors import ClientError, NoSuchModelError
from loadtest.record import Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from loadtest.endpoint import Endpoint
    from loadtest.record import Record, Request

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
# The first wait and the longest one before gRPC connects again. By default it waits up to 120 s.
# `grpc.min_reconnect_backoff_ms` stays: it is also the time that a connection may take.
_RECONNECT_MS = (100, 1000)
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
# Inputs and outputs that a model may lack. They are used if it has them.
_FLAGS = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
_OUTPUTS = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")


class TritonClient:
    """A client for any number of requests at a time; see ``endpoint.Backend``."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._headers = dict(endpoint.headers)
        self._client: Any = None
        # The model's inputs, and those of its outputs that we ask for; `require_model` sets them.
        self._inputs: frozenset[str] = frozenset()
        self._outputs: list[InferRequestedOutput] = []
        # The input tensors that only depend on whether a request streams, by that.
        self._flags: dict[bool, list[InferInput]] = {}
        self._ready = Readiness(self._require_ready, endpoint.reconnect)

    async def __aenter__(self) -> TritonClient:  # noqa: PYI034 - Self is not in Python 3.10
        """Open the channel. It connects with the first request."""
        first_ms, longest_ms = _RECONNECT_MS
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", first_ms),
            ("grpc.max_reconnect_backoff_ms", longest_ms),
        ]
        # docker can set http_proxy in every container, and gRPC would use it for this machine, too.
        if self._endpoint.url.rpartition(":")[0] in _LOOPBACK:
            options.append(("grpc.enable_http_proxy", 0))
        try:
            self._client = InferenceServerClient(
                self._endpoint.url, channel_args=options, **self._endpoint.tls
            )
        except OSError as error:
            raise ClientError(
                f"cannot read {error.filename}: {error.strerror}; name a PEM file"
            ) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the channel, and cancel what still runs."""
        await self._client.close()

    def stop(self) -> None:
        """See ``endpoint.Backend``."""
        self._ready.stopping = True

    # --- before the first request ---------------------------------------------------------------

    async def require_model(self, inputs: Iterable[str]) -> None:
        """See ``endpoint.Backend``.

        Raises:
            ClientError: there is no such server, no such model, or it lacks an input.
        """
        await self._ready.wait(self._endpoint.wait_ready)
        try:
            metadata = await self._client.get_model_metadata(
                self._endpoint.model, headers=self._headers, client_timeout=PREFLIGHT_SECONDS
            )
        except InferenceServerException as error:
            raise ClientError(
                f"the server at {self._endpoint.url} (--url) does not describe the model "
                f"{self._endpoint.model!r}: {_message(error)}; see the server's log"
            ) from error
        self._inputs = frozenset(tensor.name for tensor in metadata.inputs)
        for name in inputs:
            if name not in self._inputs:
                raise ClientError(
                    f"the model {self._endpoint.model!r} has no input {name}, but "
                    f"{', '.join(sorted(self._inputs)) or 'none at all'}; "
                    "name a model that vLLM serves with --model"
                )
        outputs = {tensor.name for tensor in metadata.outputs}
        if "text_output" not in outputs:
            raise ClientError(
                f"the model {self._endpoint.model!r} has no output text_output; "
                "name a model that vLLM serves with --model"
            )
        self._outputs = [InferRequestedOutput(name) for name in _OUTPUTS if name in outputs]

    async def connect(self, connections: int) -> None:
        """See ``endpoint.Backend``; gRPC keeps its connection."""

    @property
    def model(self) -> str:
        """See ``endpoint.Backend``."""
        return self._endpoint.model

    @property
    def counts_tokens(self) -> bool:
        """See ``endpoint.Backend``."""
        return "return_num_output_tokens" in self._inputs

    async def _require_ready(self) -> None:
        """Check that the server answers and that the model is ready.

        Raises:
            NoSuchModelError: the server does not have the model.
            ClientError: no server answers, or the model is not ready.
        """
        where = f"{self._endpoint.url} (--url)"
        model = self._endpoint.model
        limits = {"headers": self._headers, "client_timeout": PREFLIGHT_SECONDS}
        try:
            await self._client.is_server_live(**limits)
        except InferenceServerException as error:
            raise ClientError(
                f"no Triton server answers at {where}: {_message(error)}; "
                "start tritonserver, and name its gRPC port (8001 by default), not the HTTP port"
            ) from error
        reason = ""
        try:
            ready = await self._client.is_model_ready(model, **limits)
        # For a name that it does not have, Triton 24.10 says "not ready", and 26.07 NOT_FOUND.
        except InferenceServerException as error:
            ready = False
            reason = f" ({_message(error)})"
        if not ready:
            await self._require_listed()
            raise ClientError(
                f"the server at {where} has no model {model!r} ready{reason}; wait for it to load "
                "(--wait-ready 300), see the server's log, or name another with --model"
            )

    async def _require_listed(self) -> None:
        """Check that the model is in the server's repository, ready or not.

        Raises:
            NoSuchModelError: it is not.
        """
        limits = {"headers": self._headers, "client_timeout": PREFLIGHT_SECONDS}
        try:
            index = await self._client.get_model_repository_index(**limits)
        # A server may refuse this (--grpc-restricted-protocol). Then the model may be there.
        except InferenceServerException:
            return
        names = sorted({model.name for model in index.models})
        if self._endpoint.model not in names:
            found = f"but {', '.join(names)}; name one of them with --model"
            raise NoSuchModelError(
                f"the server at {self._endpoint.url} (--url) has no model "
                f"{self._endpoint.model!r}, {found if names else 'and no other in its repository'}"
            )

    # --- one request ----------------------------------------------------------------------------

    async def ask(self, request: Request, record: Record) -> None:
        """See ``loops.Client``.

        Raises:
            ServerGoneError: the server has not come back.
        """
        try:
            await self._ask(request, record)
        except Exception:
            # The run ends, and the loop cancels the other requests.
            self.stop()
            raise

    async def _ask(self, request: Request, record: Record) -> None:
        """Send the request, and note its answer or its failure in the record.

        A complete answer is left without an outcome: the loop sets it.

        Raises:
            ServerGoneError: the server has not come back.
            asyncio.CancelledError: the run ends.
        """
        # 1) Send the request, and collect the pieces of its answer
        stream = self._client.stream_infer(
            _one(self._infer_request(request)),
            stream_timeout=self._endpoint.stream_timeout,
            headers=self._headers or None,
        )
        text_count = 0
        try:
            async for result, error in stream:
                # The model has refused the request, or it has failed.
                if error is not None:
                    record.fail("error from the model", _message(error))
                    return
                text_count += _add(result.get_response(), record)
                if request.cancel_after is not None and len(record.times) >= request.cancel_after:
                    record.outcome = Outcome.CANCELLED
                    stream.cancel()
                    return
        # The connection failed, or the timeout has passed. gRPC cancels a call that ends while its
        # request is being sent.
        except (grpc.RpcError, asyncio.CancelledError) as error:
            if self._ready.stopping:
                raise asyncio.CancelledError from error
            await self._note_failure(error, record)
            return
        # 2) Distinguish an empty answer, which counts as one piece, from a missing one
        if not text_count:
            record.fail("no response", "the stream ended without a response")
        elif not record.times:
            record.times.append(time.perf_counter())

    async def _note_failure(self, error: BaseException, record: Record) -> None:
        """Note why a call failed.

        If the connection was lost and ``--reconnect`` is given, wait for the server.

        Raises:
            ServerGoneError: the server has not come back.
        """
        code = None
        details = str(error)
        if isinstance(error, grpc.aio.AioRpcError):
            code = error.code()
            details = str(error.details())
        limit = self._endpoint.stream_timeout
        # If a call ends while its request is being sent, gRPC has these two errors for all reasons.
        cancelled = isinstance(error, asyncio.CancelledError)
        ended_early = cancelled or details == "Internal error from Core"
        out_of_time = limit is not None and time.perf_counter() - record.sent >= limit
        if code is grpc.StatusCode.DEADLINE_EXCEEDED or (ended_early and out_of_time):
            record.fail("timeout", f"no complete answer within {limit} s (--stream-timeout)")
        # A server that ends may also cancel what it is doing.
        elif code in _LOST or ended_early:
            lost = details or "the call was cancelled"
            record.fail("connection", f"the connection to {self._endpoint.url} was lost: {lost}")
            await self._ready.wait_again()
        else:
            record.fail(code.name if code else "gRPC", details)

    def _infer_request(self, request: Request) -> dict[str, Any]:
        """Return a request as the arguments that ``stream_infer`` takes for it."""
        text = request.prompt.encode("utf-8", errors="replace")
        inputs = [_strings("messages" if request.is_chat else "text_input", [text])]
        if request.images:
            inputs.append(_strings("image", [image.encode("ascii") for image in request.images]))
        sampling = json.dumps(dict(request.parameters))
        inputs.append(_strings("sampling_parameters", [sampling.encode()]))
        return {
            "model_name": self._endpoint.model,
            "inputs": [*inputs, *self._boolean_inputs(stream=request.stream)],
            "outputs": self._outputs,
            "request_id": str(self._endpoint.first_id + request.index),
        }

    def _boolean_inputs(self, *, stream: bool) -> list[InferInput]:
        """Return the boolean inputs of a request that the model has; they are made only once."""
        if stream not in self._flags:
            values = {"stream": stream, **dict.fromkeys(_FLAGS, True)}
            # It is left out if it is false: the official backend refuses that in a stream.
            if self._endpoint.exclude_input:
                values["exclude_input_in_output"] = True
            self._flags[stream] = [
                _boolean(name, value=value)
                for name, value in values.items()
                if name in self._inputs
            ]
        return self._flags[stream]


def _strings(name: str, values: list[bytes]) -> InferInput:
    tensor = InferInput(name, [len(values)], "BYTES")
    # NumPy's own type for bytes would cut off NUL characters at the end.
    tensor.set_data_from_numpy(np.array(values, dtype=np.object_))
    return tensor


def _boolean(name: str, *, value: bool) -> InferInput:
    tensor = InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


async def _one(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield a single request: ``stream_infer`` takes an iterator."""
    yield request


def _add(response: Any, record: Record) -> int:
    """Add a response to the record; return the number of its texts.

    The last response may have no tensors. It only says that it is the last one.
    """
    # Triton sends the tensors as bytes, in the order of their names.
    names = [output.name for output in response.outputs]
    found: dict[str, bytes] = dict(zip(names, response.raw_output_contents, strict=False))
    if "text_output" not in found:
        return 0
    if counted := found.get("num_input_tokens"):
        record.input_tokens = struct.unpack("<I", counted)[0]
    reasons = tuple(_split(found.get("finish_reason", b"")))
    # In a stream, each reason is "None" before the end.
    if any(reason not in {"", "None"} for reason in reasons):
        record.finish_reasons = reasons
    tokens = None
    if counts := found.get("num_output_tokens"):
        tokens = sum(struct.unpack(f"<{len(counts) // 4}I", counts))
    texts = list(_split(found["text_output"]))
    record.add(texts, tokens)
    return len(texts)


def _split(data: bytes) -> Iterator[str]:
    """Yield the strings of a tensor. Each has its length in front, four bytes."""
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        at += 4 + size
        yield data[at - size : at].decode("utf-8", errors="replace")


def _message(error: InferenceServerException) -> str:
    message: str = error.message() or str(error)
    return message.strip()
