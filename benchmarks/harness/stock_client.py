"""ModelStreamInfer through NVIDIA's own `tritonclient.grpc.aio`, as a user's program would call it.

It spends 50-100 us of a core on each message, which on few cores is part of what is measured: beside the other clients it
shows what a user of it sees.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.grpc.aio import InferenceServerClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from harness.load import Request
    from harness.metrics import Answer

StockConnection = InferenceServerClient


class StockClient:
    """One stream, kept open from request to request."""

    def __init__(self, connection: InferenceServerClient, model: str) -> None:
        self._model = model
        self._asked: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._replies = connection.stream_infer(self._requests())

    async def _requests(self) -> AsyncIterator[dict[str, Any]]:
        while (request := await self._asked.get()) is not None:
            yield request

    async def ask(self, request: Request, answer: Answer) -> None:
        """See `load.Client`."""
        sampling = json.dumps({"max_tokens": request.answer_tokens, "ignore_eos": True, "temperature": 0})
        inputs = [
            _tensor("text_input", "BYTES", request.prompt.encode()),
            _tensor("sampling_parameters", "BYTES", sampling.encode()),
        ]
        inputs += [_tensor("stream", "BOOL", request.stream), _tensor("exclude_input_in_output", "BOOL", True)]  # noqa: FBT003
        outputs = [InferRequestedOutput("text_output")]
        self._asked.put_nowait(
            {"model_name": self._model, "inputs": inputs, "outputs": outputs, "enable_empty_final_response": True}
        )
        async for result, error in self._replies:
            if error:
                raise error
            text = result.as_numpy("text_output")
            if text is not None:
                answer.add(text[0].decode())
            if result.get_response().parameters["triton_final_response"].bool_param:
                return

    async def close(self) -> None:
        """See `load.Client`."""
        self._asked.put_nowait(None)


def _tensor(name: str, kind: str, value: bytes | bool) -> InferInput:  # noqa: FBT001
    tensor = InferInput(name, [1], kind)
    tensor.set_data_from_numpy(np.array([value], dtype=np.bool_ if kind == "BOOL" else np.object_))
    return tensor
