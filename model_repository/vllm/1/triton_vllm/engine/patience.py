"""Decide how long to wait for a silent EngineCore."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

# A compilation, a load and a long prefill keep a core busy.
_BUSY = 0.05
"""The share of one core above which an engine counts as working."""


def cpu_seconds() -> float:
    """Return the processor time of this process's children and all their children, s."""
    total = 0.0
    for child in psutil.Process(os.getpid()).children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        # The time of children that have ended, such as compilers, is their parent's.
        total += times.user + times.system + times.children_user + times.children_system
    return total


@dataclass(frozen=True)
class Patience:
    """How long EngineCore may be silent.

    Attributes:
        longest: seconds without an answer after which EngineCore hangs, whatever it does.
        idle: seconds after which it hangs if no output comes either, and its processes hardly use
            the processor. With 0 only ``longest`` counts.
        usage: returns the processor time of EngineCore and its workers, s. Called in a thread.
    """

    longest: float
    idle: float = 0.0
    usage: Callable[[], float] = cpu_seconds

    async def lasts(
        self, question: Coroutine[Any, Any, Any], last_output: Callable[[], float]
    ) -> float:
        """Wait for an answer.

        Args:
            question: asks EngineCore.
            last_output: returns when the last output came, in the event loop's time in seconds.

        Returns:
            0 if the answer has come in time. Otherwise how long it has not come, in seconds.

        Raises:
            Exception: the question's own exception.
        """
        clock = asyncio.get_running_loop().time
        answer = asyncio.ensure_future(question)
        began = clock()
        try:
            while True:
                since = clock()
                used = await asyncio.to_thread(self.usage)
                left = began + self.longest - since
                await asyncio.wait({answer}, timeout=min(left, self.idle or left))
                if answer.done():
                    answer.result()
                    return 0.0
                silence = clock() - began
                if silence >= self.longest:
                    return self.longest
                used = await asyncio.to_thread(self.usage) - used
                if self.idle and last_output() < since and used < _BUSY * (clock() - since):
                    return silence
        finally:
            answer.cancel()
