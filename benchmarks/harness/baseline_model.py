"""The model.py that one would write first: vLLM imported at the top of the module.

The baseline of `cold_start.py`. It serves whole answers to `text_input`, enough to see the first token.
"""

from __future__ import annotations

import asyncio
import json
import locale
import threading
from pathlib import Path
from typing import Any

# What everybody needs to start at all: the stub embeds Python without a locale, open() means ASCII, and torch's import
# dies of it with UnicodeDecodeError.
locale.setlocale(locale.LC_ALL, "C.UTF-8")

import numpy as np  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402


class TritonPythonModel:
    """One engine in an event loop on a thread of its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine."""
        path = Path(args["model_repository"]) / "vllm_engine_args.json"
        self._arguments = json.loads(path.read_text(encoding="utf-8"))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._engine = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self) -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments))

    def execute(self, requests: list[Any]) -> None:
        """Answer each request when it is complete."""
        for request in requests:
            prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            text = pb_utils.get_input_tensor_by_name(request, "sampling_parameters").as_numpy()[0].decode()
            work = self._answer(str(id(request)), prompt, json.loads(text), request.get_response_sender())
            asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _answer(self, name: str, prompt: str, sampling: dict[str, Any], sender: Any) -> None:
        params = SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY)
        async for output in self._engine.generate({"prompt": prompt}, params, name):
            text = np.array([output.outputs[0].text.encode()], dtype=np.object_)
            response = pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)])
            sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self) -> None:
        """End the engine."""
        self._engine.shutdown()
