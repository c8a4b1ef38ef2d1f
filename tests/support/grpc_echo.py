"""A gRPC server that speaks Triton's protocol and answers " ID: PROMPT"; for tests of clients without a model."""

from __future__ import annotations

import struct
import threading
from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator


INPUTS = (
    *("text_input", "messages", "stream", "sampling_parameters", "exclude_input_in_output"),
    *("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"),
)
OUTPUTS = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")


class EchoServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A context manager; a prompt with the word "fail" gets an error.

    Args:
        delay: seconds to wait before the answer to a request, by its id.
        lacking: inputs that the model does not have, and with `return_X` the output X.
        port: the port to listen on; 0 takes a free one.
        credentials: for TLS.
        unready: so many times the model says that it is not ready.
        models: names in its repository; None refuses to list them.
        errors: answer with errors about models that are not ready, as Triton 26.07 does; else say so, as 24.10 does.

    A piece is a token, and a whole answer has as many tokens as it would have pieces.
    """

    def __init__(
        self,
        delay: Callable[[int], float] = lambda _: 0.0,
        lacking: Collection[str] = (),
        port: int = 0,
        credentials: grpc.ServerCredentials | None = None,
        unready: int = 0,
        models: Collection[str] | None = ("vllm",),
        errors: bool = False,
    ) -> None:
        self.url = ""
        self.requests: list[dict[str, bytes]] = []
        """The tensors of each request so far."""
        self.metadata: list[dict[str, str]] = []
        """The headers of each stream so far."""
        self._lacking = lacking
        self._port = port
        self._credentials = credentials
        self.unready = unready
        self._models = models
        self._errors = errors
        self.streamed: list[bool] = []
        """The value of `stream` in each request so far."""
        self._delay = delay
        self._stopping = threading.Event()
        self._server = grpc.server(futures.ThreadPoolExecutor(16))

    def __enter__(self) -> EchoServer:  # noqa: PYI034 - Self is not in the typing of Python 3.10
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        place = f"127.0.0.1:{self._port}"
        if self._credentials:
            port = self._server.add_secure_port(place, self._credentials)
        else:
            port = self._server.add_insecure_port(place)
        self.url = f"127.0.0.1:{port}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._server.stop(0).wait()

    def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol names it
        return service_pb2.ServerLiveResponse(live=True)

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol names it
        self.unready -= 1
        ready = request.name == "vllm" and self.unready < 0
        if self._errors and not ready:
            known = request.name in (self._models or ())
            code = grpc.StatusCode.UNAVAILABLE if known else grpc.StatusCode.NOT_FOUND
            reason = "has no available versions" if known else "is not found"
            context.abort(code, f"Request for unknown model: '{request.name}' {reason}")
        return service_pb2.ModelReadyResponse(ready=ready)

    def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol names it
        if self._models is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "this protocol is restricted")
        response = service_pb2.RepositoryIndexResponse()
        for name in self._models or ():
            response.models.add(name=name)
        return response

    def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol names it
        response = service_pb2.ModelMetadataResponse(name=request.name)
        for name in INPUTS:
            if name not in self._lacking:
                response.inputs.add(name=name)
        for name in OUTPUTS:
            if f"return_{name}" not in self._lacking:
                response.outputs.add(name=name)
        return response

    def ModelStreamInfer(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802 - the protocol names it
        self.metadata.append(dict(context.invocation_metadata()))
        for request in request_iterator:
            tensors = dict(zip((i.name for i in request.inputs), request.raw_input_contents, strict=True))
            self.requests.append(tensors)
            prompt = (tensors.get("text_input") or tensors["messages"])[4:].decode()  # a 4-byte length comes first
            streaming = tensors["stream"] == b"\x01"
            self.streamed.append(streaming)
            if self._stopping.wait(self._delay(int(request.id))):
                context.abort(grpc.StatusCode.UNAVAILABLE, "the server ends")
            if "fail" in prompt:
                yield service_pb2.ModelStreamInferResponse(error_message="told to fail")
                continue
            text = f" {request.id}: {prompt}"
            pieces = list(text) if streaming else [text]
            for number, piece in enumerate(pieces, 1):
                reason = "stop" if number == len(pieces) else "None"
                tokens = 1 if streaming else len(text)
                answer = _answer(request, piece.encode(), reason.encode(), len(prompt), tokens)
                yield service_pb2.ModelStreamInferResponse(infer_response=answer)


def _answer(request: Any, text: bytes, reason: bytes, input_tokens: int, output_tokens: int) -> Any:
    response = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
    values = {
        "text_output": ("BYTES", struct.pack("<I", len(text)) + text),
        "finish_reason": ("BYTES", struct.pack("<I", len(reason)) + reason),
        "num_input_tokens": ("UINT32", struct.pack("<I", input_tokens)),
        "num_output_tokens": ("UINT32", struct.pack("<I", output_tokens)),
    }
    for wanted in request.outputs:
        datatype, value = values[wanted.name]
        response.outputs.add(name=wanted.name, datatype=datatype, shape=[1])
        response.raw_output_contents.append(value)
    return response
