"""Where an engine comes from: this process alone starts it, or several instances share one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.instances.counts import Counts
from triton_vllm.instances.sleep import SleepState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.base.protocols import EngineClient
    from triton_vllm.instances.machines import Machines


@dataclass(frozen=True)
class Loss:
    """Why an engine is abandoned.

    Attributes:
        what: ends the log's sentence "the engine …", for example ``has died``.
        in_order: whether it ended normally, e.g. because the model was unloaded.
        for_good: whether no engine may take its place. ``what`` is then the whole sentence.
    """

    what: str
    in_order: bool = False
    for_good: bool = False


class Source:
    """The origin of an engine: this process alone starts it, or several processes share it.

    Attributes:
        alone: whether no other instance uses the engine.
        counts: the requests of all instances.
        sleep_state: whether the engine sleeps.
    """

    alone = True
    counts: Counts
    sleep_state: SleepState

    @property
    def leads(self) -> bool:
        """Whether this instance has launched the engine, or must launch it."""
        return True

    # Except for `start`, the methods here are those of an engine without other instances.

    async def start(self, *, in_thread: bool = False) -> EngineClient:
        """Start the engine or connect to it, and return its client; also after each loss.

        Args:
            in_thread: whether the event loop goes on meanwhile.
        """
        raise NotImplementedError

    def share(self) -> None:
        """Note that the engine serves and is awake, and tell the other instances."""
        self.sleep_state.note_change(asleep=False)

    def loss(self) -> Loss | None:
        """Return why the engine must be abandoned, if its client cannot know that.

        It is called twice a second.
        """
        return None

    def retire(self, *, hung: bool) -> None:
        """Make the other instances abandon the engine."""

    def forsake(self, reason: str) -> None:
        """Make the other instances end the engine for good, too."""

    def close(self) -> None:
        """Tell the other instances that the engine is about to end for good."""


@dataclass
class Sole(Source):
    """An engine that only this process uses. Its client knows whether EngineCore has died.

    Attributes:
        vllm: the loaded vLLM.
        values: engine arguments.
        machines: the other machines of the engine; None if it is on one.
    """

    vllm: vllm_api.Vllm
    values: Mapping[str, Any]
    machines: Machines | None = None
    counts: Counts = field(default_factory=Counts)
    sleep_state: SleepState = field(default_factory=SleepState)

    async def start(self, *, in_thread: bool = False) -> EngineClient:
        """See ``Source``."""
        if in_thread:
            llm = await asyncio.to_thread(vllm_api.start, self.vllm, self.values)
        else:
            # This blocks the loop, as in vLLM's own server. Nothing else can be done until the
            # model is loaded.
            llm = vllm_api.start(self.vllm, self.values)
        if self.machines is not None:
            self.machines.note()
        return llm

    def loss(self) -> Loss | None:
        """See ``Source``."""
        if self.machines is not None and self.machines.is_one_lost():
            return Loss("has lost a worker, perhaps one of another machine")
        return None
