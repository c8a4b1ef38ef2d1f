"""Decide how long to wait for a silent EngineCore."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.engine.processes import current

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    import psutil

STEP_S = 2.0
"""From one look at the engine's processes to the next, s."""
_BUSY = 0.05
"""The share of one core above which the engine counts as working."""
# On a busy machine, a process may wait so long for a processor that it uses hardly any.
_AT_WORK = {"running", "disk-sleep"}
_STOPPED = "stopped"


def worked_seconds() -> float:
    """Return the processor time of the engine and all its processes, s.

    Infinity means that they may work, whatever processor time they use: one waits for a processor
    or a disk, a GPU computes, or this process has not started them.
    """
    # Imported here because an environment in parts is unpacked after this module is imported.
    import psutil

    try:
        processes = list(current())
        states = {process.status() for process in processes}
        # The engine does no work, whatever the others do: workers poll for a stopped EngineCore.
        if _STOPPED in states:
            return 0.0
        if not processes or states & _AT_WORK or vllm_api.devices_compute():
            return math.inf
        return sum(map(_seconds, processes))
    # A process has just ended, or the kernel does not show it.
    except psutil.Error:
        return math.inf


def _seconds(process: psutil.Process) -> float:
    """Return the processor time of a process, s."""
    times = process.cpu_times()
    # The time of children that have ended, such as compilers, is their parent's.
    ended: float = times.children_user + times.children_system
    return float(times.user + times.system) + ended


@dataclass(frozen=True)
class Patience:
    """How long EngineCore may be silent.

    Attributes:
        longest: seconds without an answer after which EngineCore hangs, whatever it does.
        idle: seconds after which it hangs if it also does nothing and gives no output. 0 means that
            only ``longest`` counts.
        worked: returns what ``worked_seconds`` returns. Called in a thread.
    """

    longest: float
    idle: float = 0.0
    worked: Callable[[], float] = worked_seconds

    async def wait_for_answer(
        self, question: Coroutine[Any, Any, Any], last_output: Callable[[], float]
    ) -> float:
        """Wait until EngineCore answers or hangs.

        Args:
            question: asks EngineCore.
            last_output: returns when the last output came, in the event loop's time in seconds.

        Returns:
            0 if the answer has come. Otherwise how long EngineCore has not answered, in seconds.

        Raises:
            Exception: the question's own exception.
        """
        clock = asyncio.get_running_loop().time
        answer = asyncio.ensure_future(question)
        began = clock()
        # When EngineCore was last seen at work.
        at_work = began
        # Unknown at first, so that an answer in time costs no look.
        worked: float | None = None
        try:
            while True:
                # 1) Wait for the answer, at most until the next look.
                since = clock()
                step = STEP_S if self.idle else self.longest
                await asyncio.wait({answer}, timeout=min(step, began + self.longest - since))
                if answer.done():
                    # This raises the question's exception.
                    answer.result()
                    return 0.0
                silence = clock() - began
                if silence >= self.longest:
                    return self.longest
                # 2) Look whether the engine's processes have worked since the last look. The first
                # look has nothing to compare with.
                before = worked
                worked = await asyncio.to_thread(self.worked)
                passed = clock() - since
                # The time of a process that has ended is missing, so the difference may be
                # negative. After infinity it is not a number. Both mean: not idle.
                is_idle = before is None or 0 <= worked - before < _BUSY * passed
                # This process was stopped, and so were its children.
                was_stopped = passed > 2 * STEP_S
                had_output = last_output() >= since
                if not is_idle or was_stopped or had_output:
                    at_work = clock()
                # 3) Without an answer and without work, EngineCore hangs.
                if self.idle and clock() - at_work >= self.idle:
                    return silence
        finally:
            answer.cancel()
