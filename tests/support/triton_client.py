"""Requests to a served model, over gRPC streams and over Triton's HTTP generate endpoints."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Response:
    """One response of a stream: tensors by name, request parameters, or the error's text, which the final response follows."""

    request_id: str
    tensors: Mapping[str, Any] = field(default_factory=dict)
    final: bool = False
    error: str = ""

    def text(self) -> str:
        """Return the first text of ``text_output``, or nothing."""
        values = self.tensors.get("text_output")
        return "" if values is None or values.size == 0 else bytes(values.reshape(-1)[0]).decode("utf-8")


def stream(
    url: str,
    requests: Sequence[Mapping[str, Any]],
    *,
    model: str = "vllm",
    parameters: Mapping[str, Any] | None = None,
    timeout: float = 300.0,
) -> list[Response]:
    """Send requests on one gRPC stream and return all responses in the order of arrival, empty final ones too.

    Args:
        url: ``127.0.0.1:PORT`` of gRPC.
        requests: inputs by tensor name; str, bool, int, float, or a list of one of these. Ids count from 0.
        model: the model's name.
        parameters: scalar request parameters, sent with each.
        timeout: seconds for the whole stream.
    """
    found: list[Response] = []
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: found.append(_response(result, error)), stream_timeout=timeout)
        for number, tensors in enumerate(requests):
            client.async_stream_infer(
                model,
                [tensor(name, value) for name, value in tensors.items()],
                request_id=str(number),
                enable_empty_final_response=True,
                parameters=dict(parameters) if parameters else None,
            )
        client.stop_stream()  # waits for all responses
    return found


def is_ready(url: str, model: str = "vllm") -> bool:
    """Return whether a model is ready, over gRPC. If it is not, Triton 24.10 says so, and 26.07 answers with an error."""
    with grpcclient.InferenceServerClient(url) as client:
        try:
            return bool(client.is_model_ready(model))
        except InferenceServerException as error:
            if "Request for unknown model" not in error.message():
                raise
            return False


def tensor(name: str, value: Any) -> Any:
    """Return an input tensor; a scalar becomes shape (1,), text becomes BYTES, integers INT64."""
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], str | bytes):
        array = np.array([v.encode() if isinstance(v, str) else v for v in values], dtype=np.object_)
    else:
        kind = {bool: np.bool_, int: np.int64, float: np.float32}[type(values[0])]
        array = np.array(values, dtype=kind)
    made = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def _response(result: Any, error: InferenceServerException | None) -> Response:
    if error is not None:
        return Response("", error=error.message())
    raw = result.get_response()
    final = raw.parameters["triton_final_response"].bool_param if "triton_final_response" in raw.parameters else False
    names = [output.name for output in raw.outputs]
    return Response(raw.id, {name: result.as_numpy(name) for name in names}, final)


def text_of(responses: Sequence[Response], request_id: int = 0) -> str:
    """Return the joined text of one request's responses."""
    return "".join(response.text() for response in responses if response.request_id == str(request_id))


def generate(url: str, payload: Mapping[str, Any], *, model: str = "vllm", timeout: float = 300.0) -> tuple[int, Any]:
    """POST to ``/v2/models/MODEL/generate``; return the status and the JSON of the answer."""
    status, body = post(url, f"/v2/models/{model}/generate", payload, timeout=timeout)
    return status, json.loads(body)


def generate_stream(
    url: str, payload: Mapping[str, Any], *, model: str = "vllm", timeout: float = 300.0
) -> tuple[int, list[Any]]:
    """POST to ``/v2/models/MODEL/generate_stream``; return the status and the JSON of each server-sent event."""
    status, body = post(url, f"/v2/models/{model}/generate_stream", payload, timeout=timeout)
    events = [line.partition(":")[2] for line in body.splitlines() if line.startswith("data:")]
    return status, [json.loads(event) for event in events] or [json.loads(body)]


def post(url: str, path: str, payload: Mapping[str, Any] | str, *, timeout: float) -> tuple[int, str]:
    """POST JSON, or a text as it is; return the status and the whole body."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)
    try:
        text = payload if isinstance(payload, str) else json.dumps(payload)
        connection.request("POST", path, text.encode(), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8")
    finally:
        connection.close()


def get(url: str, path: str, *, timeout: float = 120.0) -> tuple[int, str]:
    """GET a path; return the status and the whole body."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8")
    finally:
        connection.close()
