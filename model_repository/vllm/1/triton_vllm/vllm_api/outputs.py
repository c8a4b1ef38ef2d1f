"""Give vLLM's output handler the engine's outputs in a fair order when it has fallen behind."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from triton_vllm.base.protocols import EngineClient

# A log probability costs the event loop 5 to 8 us, so 16 outputs with 20 each take about 2 ms.
SLICE = 16
"""The most outputs with log probabilities that are handled at a time."""
STEPS = 8
"""After so many steps, held outputs are given although more steps have arrived."""


def deliver_fairly(llm: EngineClient) -> None:
    """Let a client's output handler take its outputs from ``FairOutputs`` from now on."""
    # A vLLM that lacks this serves outputs in its own order.
    if hasattr(llm, "engine_core"):
        llm.engine_core.get_output_async = FairOutputs(llm).take


class FairOutputs:
    """Takes the outputs of EngineCore, and gives them to vLLM's output handler.

    EngineCore does not wait for the handler. With log probabilities it can be seconds ahead. In
    vLLM's order, the first token of a new request would wait for all of that. So outputs with log
    probabilities are held back then. Each request gets one of them in turn, and all other outputs
    go first.

    Args:
        llm: the engine's client, before it has taken any output.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._receive = llm.engine_core.get_output_async
        # Of each request, in the order of their turns: outputs, each with its step's message.
        self._held: dict[str, deque[tuple[Any, Any]]] = {}
        # Steps whose outputs were taken since held ones were given.
        self._steps = 0

    async def take(self) -> Any:
        """Wait for outputs, and return them in a message of vLLM's type.

        Raises:
            Exception: vLLM's own exception.
        """
        # The handler itself waits only if no outputs are there. Other tasks, such as a
        # cancellation, must run although it has fallen behind.
        await asyncio.sleep(0)
        arrived = self._llm.engine_core.outputs_queue.qsize()
        if not arrived or self._steps >= STEPS:
            self._steps = 0
            held = self._next_held()
            if held is not None:
                return held
        message = await self._receive()
        if self._held or arrived > 1:
            self._hold_back(message)
            self._steps += 1
        return message

    def _hold_back(self, message: Any) -> None:
        """Take the outputs with log probabilities out of a message."""
        others = []
        for output in message.outputs:
            # All later outputs of the same request must wait, too.
            if _has_log_probabilities(output) or output.request_id in self._held:
                _keep_small(output)
                self._held.setdefault(output.request_id, deque()).append((message, output))
            else:
                others.append(output)
        message.outputs = others

    def _next_held(self) -> Any:
        """Return the next held outputs of one step, or None."""
        step = None
        outputs: list[Any] = []
        while self._held and len(outputs) < SLICE:
            request = next(iter(self._held))
            # vLLM, too, ignores the outputs of a request that has been aborted.
            if request not in self._llm.output_processor.request_states:
                del self._held[request]
                continue
            message, output = self._held[request][0]
            # vLLM takes all outputs of a message for outputs of the same time.
            if step is not None and message is not step:
                break
            step = message
            outputs.append(output)
            waiting = self._held.pop(request)
            waiting.popleft()
            if waiting:
                self._held[request] = waiting
        if step is None:
            return None
        part = copy.copy(step)
        part.outputs = outputs
        # They have been given with the rest of the step.
        part.scheduler_stats = None
        return part


def _has_log_probabilities(output: Any) -> bool:
    return output.new_logprobs is not None or output.new_prompt_logprobs_tensors is not None


def _keep_small(output: Any) -> None:
    """Give an output arrays of its own.

    With 20 log probabilities it then takes 0.8 kB instead of 1.9, and this takes 4 us. The arrays
    that vLLM makes are views of views of what it has received.
    """
    lists = output.new_logprobs
    # Before 0.12 these are no arrays. A named tuple of another kind may hold more than its fields.
    if type(lists).__bases__ == (tuple,) and hasattr(lists, "_make"):
        output.new_logprobs = lists._make(
            value.copy() if isinstance(value, np.ndarray) else value for value in lists
        )
