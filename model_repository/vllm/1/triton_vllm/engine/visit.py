"""A request that did not come through Triton, from its arrival until its answer is written."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from triton_vllm import vllm_api

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from triton_vllm.base.errors import AdapterError
    from triton_vllm.base.protocols import EngineClient, Output
    from triton_vllm.lora.store import Version

# EngineCore may be in a step, and may read the adapter again.
LINGER_S = 30.0
"""How long a replaced adapter stays after its last request, s."""


@dataclass(slots=True, eq=False)
class Part:
    """A request that vLLM works on for a visit.

    Attributes:
        id: its id in vLLM.
        count: its completions.
        put: gives it an output, or the exception with which it ends.
    """

    id: str
    count: int
    put: Callable[[Output | Exception], None]


@dataclass(slots=True, eq=False)
class Visit:
    """The state of such a request; all of it belongs to the event loop.

    Attributes:
        weight: how many requests it counts for.
        asked: the completions and inputs that vLLM has been asked for.
        parts: vLLM's requests for it.
        ended: why it was ended, if it was.
        waiting_since: when it came, in the event loop's time in seconds. Infinity once vLLM is
            known to have begun to work on it.
        deadline: ends it when its timeout has expired.
        adapter: its LoRA adapter. Its files exist as long as some code holds this object.
    """

    weight: int = 1
    asked: int = 0
    parts: list[Part] = field(default_factory=list)
    ended: AdapterError | None = None
    waiting_since: float = 0.0
    deadline: asyncio.TimerHandle | None = None
    adapter: Version | None = None

    def waits(self, llm: EngineClient) -> bool:
        """Return whether vLLM has not begun to work on it."""
        # If vLLM does not say so, the request counts as begun: only streams show it.
        if self.parts and all(
            vllm_api.has_begun(llm, part.id, part.count) is not False for part in self.parts
        ):
            self.waiting_since = math.inf
        return self.waiting_since != math.inf
