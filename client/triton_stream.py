"""Prompts to a Triton model over gRPC streams, as many at a time as the model may batch.

Every request has a stream of its own on one shared channel: an error in a stream names no request, so with one stream
for all of them nobody could say which prompt failed.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]  # grpcio publishes no types
import numpy as np
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from prompt_file import Answer, ClientError, Prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

MAX_IN_FLIGHT = (
    256  # vLLM's default max_num_seqs on most GPUs; more would only wait in the server's queue
)
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
PREFLIGHT_SECONDS = 10.0  # a server that is up answers in milliseconds


@dataclass(frozen=True)
class Session:
    """Whom to ask and how: ``stream_timeout`` in seconds per request, or None to wait forever."""

    url: str
    model: str
    streaming: bool
    stream_timeout: float | None
    sampling_parameters: Mapping[str, Any]


async def ask_all(
    session: Session, prompts: Sequence[Prompt], on_answer: Callable[[], None]
) -> list[Answer]:
    """Send every prompt and return the answers in the order of ``prompts``; call ``on_answer`` after each.

    Raises:
        ClientError: there is no such server or no such model; nothing was sent.
    """
    places = asyncio.Semaphore(MAX_IN_FLIGHT)
    # gRPC takes http_proxy, which docker sets, for this machine as well
    direct = [("grpc.enable_http_proxy", 0)] if session.url.rsplit(":", 1)[0] in LOOPBACK else None
    async with InferenceServerClient(session.url, channel_args=direct) as client:
        await _require_model(client, session)

        async def ask_in_turn(prompt: Prompt) -> Answer:
            async with places:
                answer = await _ask(client, session, prompt)
            on_answer()
            return answer

        return list(await asyncio.gather(*(ask_in_turn(prompt) for prompt in prompts)))


async def _require_model(client: Any, session: Session) -> None:
    where = f"{session.url} (--url)"
    try:
        await client.is_server_live(client_timeout=PREFLIGHT_SECONDS)
    except InferenceServerException as error:
        raise ClientError(
            f"no Triton server answers at {where}: {_reason(error)}; "
            "start tritonserver, and name its gRPC port (8001 by default), not the HTTP port"
        ) from error
    try:
        ready = await client.is_model_ready(session.model, client_timeout=PREFLIGHT_SECONDS)
    except InferenceServerException as error:
        raise ClientError(
            f"the server at {where} was asked for the model {session.model}: {_reason(error)}"
        ) from error
    if not ready:
        raise ClientError(
            f"the server at {where} has no model {session.model!r} ready; "
            "wait for it to load, see the server's log, or name another with --model"
        )


async def _ask(client: Any, session: Session, prompt: Prompt) -> Answer:
    pieces: list[str] = []
    try:
        responses = client.stream_infer(
            _one(_request(session, prompt)), stream_timeout=session.stream_timeout
        )
        async for result, error in responses:
            if error is not None:
                return Answer(prompt, "".join(pieces), _reason(error))
            pieces += _texts(result)
    except grpc.RpcError as error:
        return Answer(prompt, "".join(pieces), _rpc_reason(error, session))
    if not pieces:
        return Answer(prompt, "", "the stream ended without a response")
    return Answer(prompt, "".join(pieces))


def _request(session: Session, prompt: Prompt) -> dict[str, Any]:
    inputs = [
        _tensor("text_input", "BYTES", [prompt.text.encode("utf-8")]),
        _tensor("stream", "BOOL", [session.streaming]),
        _tensor("exclude_input_in_output", "BOOL", [True]),
        _tensor(
            "sampling_parameters",
            "BYTES",
            [json.dumps(dict(session.sampling_parameters)).encode("utf-8")],
        ),
    ]
    return {
        "model_name": session.model,
        "inputs": inputs,
        "outputs": [InferRequestedOutput("text_output")],
        "request_id": str(prompt.request_id),
    }


def _tensor(name: str, datatype: str, values: list[Any]) -> Any:
    tensor = InferInput(name, [len(values)], datatype)
    tensor.set_data_from_numpy(
        np.array(values, dtype=np.object_ if datatype == "BYTES" else np.bool_)
    )
    return tensor


async def _one(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def _texts(result: Any) -> list[str]:
    values = result.as_numpy("text_output")
    if values is None:  # a response without tensors only says that it was the last one
        return []
    return [bytes(value).decode("utf-8", errors="replace") for value in values.reshape(-1)]


def _reason(error: InferenceServerException) -> str:
    message: str = error.message() or str(error)
    return message.strip()


def _rpc_reason(error: grpc.RpcError, session: Session) -> str:
    code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no complete answer within {session.stream_timeout} s (--stream-timeout)"
    if code is grpc.StatusCode.UNAVAILABLE:
        return f"the connection to {session.url} was lost: {error.details()}"
    return str(error.details() if code is not None else error)
