"""Gather the outputs of a pooling request with several parts, each of which is a request to vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_vllm.inference.outcome import failure
from triton_vllm.protocols import Gathered

if TYPE_CHECKING:
    from collections.abc import Callable


class Gathering:
    """The outputs so far; called in the engine's event loop.

    Args:
        count: parts of the request.
        done: takes what the request comes to: all outputs as one, or the first output or exception of a part that failed.
    """

    def __init__(self, count: int, done: Callable[[Any], None]) -> None:
        self._outputs: list[Any] = [None] * count
        self._missing = count
        self._done = done

    def take(self, number: int, item: Any) -> None:
        """Take the output, or the exception, of a part."""
        if isinstance(item, Exception) or failure(item) is not None:
            self._missing = 0
            self._done(item)
        elif self._missing:
            self._outputs[number] = item
            self._missing -= 1
            if not self._missing:
                self._done(Gathered(self._outputs))
