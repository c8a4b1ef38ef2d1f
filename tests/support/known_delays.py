"""A model for Triton's Python backend that waits for known times, and says when it sent what.

Triton's stub imports this file.

``sampling_parameters`` has ``first_ms`` and ``gap_ms``, the times before the first token and before
each other one, and ``max_tokens``. Each token's text is the time at which it was sent, in seconds
of the clock that ``time.perf_counter`` reads in all processes of one Linux machine. The text of the
first token begins with the time at which the request came.

With ``"alone": true``, one request is answered at a time. The others wait.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_INPUTS = (
    ("text_input", "TYPE_STRING"),
    ("stream", "TYPE_BOOL"),
    ("sampling_parameters", "TYPE_STRING"),
    ("exclude_input_in_output", "TYPE_BOOL"),
    ("return_num_input_tokens", "TYPE_BOOL"),
    ("return_num_output_tokens", "TYPE_BOOL"),
)
_OUTPUTS = (
    ("text_output", "TYPE_STRING"),
    ("num_input_tokens", "TYPE_UINT32"),
    ("num_output_tokens", "TYPE_UINT32"),
)
# More requests than this wait for a thread, and their times are no longer known.
_THREADS = 256


class TritonPythonModel:
    """See the module."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Declare the tensors, so that ``config.pbtxt`` need not list them."""
        for name, kind in _INPUTS:
            tensor = {"name": name, "data_type": kind, "dims": [1], "optional": True}
            config.add_input(tensor)
        for name, kind in _OUTPUTS:
            config.add_output({"name": name, "data_type": kind, "dims": [-1]})
        return config

    def initialize(self, _args: Mapping[str, str]) -> None:
        """Make the threads that wait."""
        self._pool = ThreadPoolExecutor(_THREADS)
        self._alone = threading.Lock()

    def execute(self, requests: Sequence[Any]) -> None:
        """Hand each request to a thread, with the time at which it came."""
        came = time.perf_counter()
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "sampling_parameters")
            parameters = json.loads(tensor.as_numpy()[0])
            streamed = pb_utils.get_input_tensor_by_name(request, "stream")
            stream = streamed is not None and bool(streamed.as_numpy()[0])
            sender = request.get_response_sender()
            self._pool.submit(self._answer, sender, parameters, came, stream=stream)

    def _answer(self, sender: Any, parameters: Mapping[str, Any], came: float, *, stream: bool) -> None:
        alone = self._alone if parameters.get("alone") else contextlib.nullcontext()
        with alone:
            _wait_and_send(sender, parameters, came, stream=stream)


def _wait_and_send(sender: Any, parameters: Mapping[str, Any], came: float, *, stream: bool) -> None:
    tokens = parameters.get("max_tokens", 1)
    texts = [f"{came:.7f}"]
    due = time.perf_counter()
    for number in range(tokens):
        due += parameters.get("gap_ms" if number else "first_ms", 0) / 1e3
        time.sleep(max(0.0, due - time.perf_counter()))  # noqa: TID251 - a program of its own
        texts.append(f" {time.perf_counter():.7f}")
        if stream:
            sender.send(_response("".join(texts), 1))
            texts = []
    if not stream:
        sender.send(_response("".join(texts), tokens))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _response(text: str, tokens: int) -> Any:
    return pb_utils.InferenceResponse(
        output_tensors=[
            pb_utils.Tensor("text_output", np.array([text.encode()], dtype=np.object_)),
            pb_utils.Tensor("num_input_tokens", np.array([1], dtype=np.uint32)),
            pb_utils.Tensor("num_output_tokens", np.array([tokens], dtype=np.uint32)),
        ]
    )
