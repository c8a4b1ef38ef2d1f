"""What vLLM's worker mixes in on a CPU (its engine argument `worker_extension_cls`): random numbers that can be wound back.

vLLM samples for a prompt that it has read in part, throws the token away and winds the request's generator back by an offset.
PyTorch's generator for CPUs has none and raises, which ended EngineCore, and all requests with it, at the first request with a
`seed` whose prompt did not fit into one step (vLLM 0.28 to 0.32, torch 2.13).
"""

from __future__ import annotations

import sys
from typing import Any


def make_generator(generator: Any) -> Any:
    """Return a class like PyTorch's `Generator` whose objects are at their beginning again wherever they are wound back to.

    Nothing that was drawn before a prompt has been read is kept. Only a request that vLLM has preempted had drawn something
    that is: it goes on with the first numbers again.
    """

    def set_offset(self: Any, offset: int) -> None:
        del offset  # relative to what get_offset gives, which means nothing
        self.manual_seed(self.initial_seed())

    def get_offset(self: Any) -> int:
        del self
        return 0

    return type("Generator", (generator,), {"get_offset": get_offset, "set_offset": set_offset})


class Worker:
    """Nothing: that this module is imported in the worker's process is what counts."""


if "torch" in sys.modules:  # vLLM's worker makes its generators by this name
    sys.modules["torch"].Generator = make_generator(sys.modules["torch"].Generator)  # type: ignore[attr-defined]
