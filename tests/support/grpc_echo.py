"""A gRPC server that speaks Triton's protocol and answers " ID: PROMPT"; for tests of clients without a model."""

from __future__ import annotations

import struct
import threading
from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class EchoServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A context manager; a prompt with the word "fail" gets an error.

    Args:
        delay: seconds to wait before the answer to a request, by its id.
    """

    def __init__(self, delay: Callable[[int], float] = lambda _: 0.0) -> None:
        self.url = ""
        self.streamed: list[bool] = []
        """The value of `stream` in each request so far."""
        self._delay = delay
        self._stopping = threading.Event()
        self._server = grpc.server(futures.ThreadPoolExecutor(16))

    def __enter__(self) -> EchoServer:  # noqa: PYI034 - Self is not in the typing of Python 3.10
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._server.stop(0).wait()

    def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol names it
        return service_pb2.ServerLiveResponse(live=True)

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol names it
        return service_pb2.ModelReadyResponse(ready=request.name == "vllm")

    def ModelStreamInfer(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802 - the protocol names it
        for request in request_iterator:
            tensors = dict(zip((i.name for i in request.inputs), request.raw_input_contents, strict=True))
            prompt = tensors["text_input"][4:].decode()  # a 4-byte length comes before each string
            streaming = tensors["stream"] == b"\x01"
            self.streamed.append(streaming)
            self._stopping.wait(self._delay(int(request.id)))
            if "fail" in prompt:
                yield service_pb2.ModelStreamInferResponse(error_message="told to fail")
                continue
            text = f" {request.id}: {prompt}"
            for piece in text if streaming else [text]:
                yield service_pb2.ModelStreamInferResponse(infer_response=_answer(request, piece.encode()))


def _answer(request: Any, text: bytes) -> Any:
    response = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
    response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
    response.raw_output_contents.append(struct.pack("<I", len(text)) + text)
    return response
