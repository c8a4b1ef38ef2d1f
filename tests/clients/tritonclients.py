"""Asks Triton with tritonclient's four forms: ``python tritonclients.py HTTP GRPC ANSWERS.json``. See `calls`.

The URLs have no scheme.
"""

from __future__ import annotations

import asyncio
import json
import queue
from typing import Any

import numpy as np
import standin
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
import tritonclient.http as httpclient
import tritonclient.http.aio as httpaio
from calls import call, main

MODEL = "vllm"
ROUNDS, AT_ONCE = 10, 8
PARAMETERS = {"max_tokens": 16, "temperature": 0}
CHAT = {
    "messages": json.dumps([{"role": "user", "content": standin.QUESTION}]),
    "tools": json.dumps([{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]),
}


def text(package: Any, name: str, value: str) -> Any:
    """Return an input with a text."""
    made = package.InferInput(name, [1], "BYTES")
    made.set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
    return made


def flag(package: Any, name: str) -> Any:
    """Return an input that is true."""
    made = package.InferInput(name, [1], "BOOL")
    made.set_data_from_numpy(np.array([True]))
    return made


def asked(package: Any, *, streamed: bool) -> list[Any]:
    """Return the inputs of a completion."""
    return [text(package, "text_input", standin.PROMPT), *([flag(package, "stream")] if streamed else ())]


def is_final(result: Any) -> bool:
    """Return whether a response is the last one of its request."""
    parameters = result.get_response().parameters
    return "triton_final_response" in parameters and parameters["triton_final_response"].bool_param


def output(result: Any, name: str = "text_output") -> str:
    """Return the text of a response; an empty final one has none."""
    values = result.as_numpy(name)
    return "" if values is None or values.size == 0 else values.reshape(-1)[0].decode()


def looks(client: Any) -> bool:
    """Ask for what clients without a stream ask before they begin."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    client.get_server_metadata()
    client.get_model_config(MODEL)
    client.get_inference_statistics(MODEL)
    client.get_model_repository_index()
    metadata = client.get_model_metadata(MODEL)
    inputs = metadata["inputs"] if isinstance(metadata, dict) else [{"name": each.name} for each in metadata.inputs]
    return "text_input" in [each["name"] for each in inputs]


@call
def grpc_looks(http: str, grpc: str) -> Any:
    with grpcclient.InferenceServerClient(grpc) as client:
        return looks(client)


@call
def grpc_infer(http: str, grpc: str) -> Any:
    """Triton has no unary gRPC for a model of the decoupled policy."""
    with grpcclient.InferenceServerClient(grpc) as client:
        return output(client.infer(MODEL, asked(grpcclient, streamed=False), parameters=PARAMETERS))


def _read(grpc: str, inputs: list[Any], parameters: dict[str, Any], **options: Any) -> list[str]:
    found: queue.Queue[Any] = queue.Queue()
    texts = []
    with grpcclient.InferenceServerClient(grpc) as client:
        client.start_stream(lambda result, error: found.put(error or result))
        client.async_stream_infer(MODEL, inputs, enable_empty_final_response=True, parameters=parameters)
        while True:
            result = found.get(timeout=120)
            if isinstance(result, Exception):
                raise result
            texts.append(output(result))
            if is_final(result):
                client.stop_stream(**options)
                return texts


@call
def grpc_whole(http: str, grpc: str) -> Any:
    return "".join(_read(grpc, asked(grpcclient, streamed=False), PARAMETERS))


@call
def grpc_streamed(http: str, grpc: str) -> Any:
    texts = _read(grpc, asked(grpcclient, streamed=True), PARAMETERS, cancel_requests=True)
    return {"text": "".join(texts), "pieces": len(texts) > 2}


@call
def grpc_refused(http: str, grpc: str) -> Any:
    return _read(grpc, asked(grpcclient, streamed=True), {"max_tokens": -1})


@call
def grpc_aio_looks(http: str, grpc: str) -> Any:
    async def ask() -> Any:
        async with grpcaio.InferenceServerClient(grpc) as client:
            assert await client.is_model_ready(MODEL)
            metadata = await client.get_model_metadata(MODEL)
            return "text_input" in [each.name for each in metadata.inputs]

    return asyncio.run(ask())


async def _left(client: Any, inputs: list[Any], name: str = "text_output") -> str:
    """Leave the stream as soon as the final flag is there."""
    parameters = PARAMETERS if name == "text_output" else {"temperature": 0}  # a call is longer

    async def requests() -> Any:
        yield {"model_name": MODEL, "inputs": inputs, "parameters": parameters, "enable_empty_final_response": True}

    found = ""
    async for result, error in client.stream_infer(requests()):
        if error:
            raise error
        found += output(result, name)
        if is_final(result):
            break
    return found


@call
def grpc_aio_streams_left(http: str, grpc: str) -> Any:
    async def ask() -> Any:
        said = set()
        async with grpcaio.InferenceServerClient(grpc) as client:
            for _ in range(ROUNDS):
                said.update(await asyncio.gather(*(_left(client, asked(grpcaio, streamed=True)) for _ in range(AT_ONCE))))
        return sorted(said)

    return asyncio.run(ask())


@call
def grpc_aio_tools(http: str, grpc: str) -> Any:
    async def ask() -> Any:
        async with grpcaio.InferenceServerClient(grpc) as client:
            return await _left(client, [text(grpcaio, name, value) for name, value in CHAT.items()], "tool_calls")

    (called,) = json.loads(asyncio.run(ask()))
    return called["function"]


@call
def http_looks(http: str, grpc: str) -> Any:
    with httpclient.InferenceServerClient(http) as client:
        return looks(client)


@call
def http_infer(http: str, grpc: str) -> Any:
    """Triton has no unary HTTP for a model of the decoupled policy, but for its generate endpoints."""
    with httpclient.InferenceServerClient(http) as client:
        return output(client.infer(MODEL, asked(httpclient, streamed=False), parameters=PARAMETERS))


@call
def http_aio_looks(http: str, grpc: str) -> Any:
    async def ask() -> Any:
        async with httpaio.InferenceServerClient(http) as client:
            assert await client.is_model_ready(MODEL)
            metadata = await client.get_model_metadata(MODEL)
            return "text_input" in [each["name"] for each in metadata["inputs"]]

    return asyncio.run(ask())


@call
def http_aio_infer(http: str, grpc: str) -> Any:
    async def ask() -> Any:
        async with httpaio.InferenceServerClient(http) as client:
            return output(await client.infer(MODEL, asked(httpaio, streamed=False), parameters=PARAMETERS))

    return asyncio.run(ask())


if __name__ == "__main__":
    main()
