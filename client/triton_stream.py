"""Send prompts to a Triton model over gRPC, as many at a time as the model may batch.

Each request has a stream of its own, and all streams share one channel. An error in a stream does
not name its request. With one stream for all prompts, it would be unknown which prompt failed.
"""

from __future__ import annotations

import asyncio
import json
import time
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

# vLLM's default max_num_seqs on most GPUs. More requests would only wait in the server's queue.
MAX_IN_FLIGHT = 256
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
# A server that is up answers in milliseconds.
PREFLIGHT_SECONDS = 10.0


@dataclass(frozen=True)
class Session:
    """The model to ask, and how.

    Attributes:
        url: host and port of the server's gRPC, ``localhost:8001``.
        model: name of the model.
        streaming: whether an answer comes in pieces.
        stream_timeout: seconds for each request; None waits forever.
        sampling_parameters: vLLM's ``SamplingParams`` by name, for every request.
    """

    url: str
    model: str
    streaming: bool
    stream_timeout: float | None
    sampling_parameters: Mapping[str, Any]


async def ask_all(
    session: Session, prompts: Sequence[Prompt], on_answer: Callable[[], None]
) -> list[Answer]:
    """Send every prompt; return the answers in the order of ``prompts``.

    Args:
        session: the model to ask.
        prompts: the prompts.
        on_answer: called after each answer, in the order in which they arrive.

    Raises:
        ClientError: there is no such server or no such model. Nothing was sent.
    """
    places = asyncio.Semaphore(MAX_IN_FLIGHT)
    host = session.url.rpartition(":")[0]
    # docker can set http_proxy in every container, and gRPC would use it for this machine, too.
    direct = [("grpc.enable_http_proxy", 0)] if host in LOOPBACK else None
    async with InferenceServerClient(session.url, channel_args=direct) as client:
        await _require_model(client, session)

        async def ask_in_turn(prompt: Prompt) -> Answer:
            # The timeout counts from here. A prompt that waits for its place has not been sent.
            async with places:
                answer = await _ask(client, session, prompt)
            on_answer()
            return answer

        return await asyncio.gather(*map(ask_in_turn, prompts))


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
            f"the server at {where} cannot say whether the model {session.model!r} is ready: "
            f"{_reason(error)}; see the server's log"
        ) from error
    if not ready:
        raise ClientError(
            f"the server at {where} has no model {session.model!r} ready; "
            "wait for it to load, see the server's log, or name another with --model"
        )


async def _ask(client: Any, session: Session, prompt: Prompt) -> Answer:
    pieces: list[str] = []
    began = time.monotonic()
    # 1) Send the request, and collect the pieces of its answer
    try:
        responses = client.stream_infer(
            _one(_request(session, prompt)), stream_timeout=session.stream_timeout
        )
        async for result, error in responses:
            # The model refused the request, or failed.
            if error is not None:
                return Answer(prompt, "".join(pieces), _reason(error))
            pieces += _texts(result)
    # The connection failed, or the timeout has passed. gRPC cancels a call that ends while its
    # request is being sent. If this task itself is cancelled, ``gather`` remembers that.
    except (grpc.RpcError, asyncio.CancelledError) as error:
        reason = _call_reason(error, session, time.monotonic() - began)
        return Answer(prompt, "".join(pieces), reason)
    # 2) Tell an empty answer, which is one empty piece, from a missing one
    missing = "" if pieces else "the stream ended without a response"
    return Answer(prompt, "".join(pieces), missing)


def _request(session: Session, prompt: Prompt) -> dict[str, Any]:
    sampling = json.dumps(dict(session.sampling_parameters))
    # The official backend's tensors, so that the client works with either model.
    inputs = [
        _tensor("text_input", "BYTES", prompt.text.encode()),
        _tensor("stream", "BOOL", value=session.streaming),
        _tensor("exclude_input_in_output", "BOOL", value=True),
        _tensor("sampling_parameters", "BYTES", sampling.encode()),
    ]
    return {
        "model_name": session.model,
        "inputs": inputs,
        "outputs": [InferRequestedOutput("text_output")],
        "request_id": str(prompt.request_id),
    }


def _tensor(name: str, datatype: str, value: Any) -> InferInput:
    tensor = InferInput(name, [1], datatype)
    # NumPy's own type for bytes would cut off NUL characters at the end.
    kind = np.object_ if datatype == "BYTES" else np.bool_
    tensor.set_data_from_numpy(np.array([value], dtype=kind))
    return tensor


async def _one(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def _texts(result: Any) -> list[str]:
    values = result.as_numpy("text_output")
    # The last response may have no tensors. It only says that it is the last one.
    if values is None:
        return []
    return [bytes(value).decode("utf-8", errors="replace") for value in values.reshape(-1)]


def _reason(error: InferenceServerException) -> str:
    message: str = error.message() or str(error)
    return message.strip()


def _call_reason(error: BaseException, session: Session, seconds: float) -> str:
    """Return why a call failed that took this many seconds."""
    code = None
    details = str(error)
    if isinstance(error, grpc.aio.AioRpcError):
        code = error.code()
        details = str(error.details())
    limit = session.stream_timeout
    # If a call ends while its request is being sent, gRPC has these two errors for all reasons.
    cancelled = isinstance(error, asyncio.CancelledError)
    ended_early = cancelled or details == "Internal error from Core"
    out_of_time = ended_early and limit is not None and seconds >= limit
    if code is grpc.StatusCode.DEADLINE_EXCEEDED or out_of_time:
        return f"no complete answer within {limit} s (--stream-timeout)"
    if code is grpc.StatusCode.UNAVAILABLE or ended_early:
        return f"the connection to {session.url} was lost: {details or 'the call was cancelled'}"
    return details
