"""Give vLLM's worker on a CPU random numbers that can be wound back (engine argument ``worker_extension_cls``).

When vLLM has read a part of a prompt, it samples a token, discards it, and winds the request's
generator back by an offset. PyTorch's generator for CPUs has no offset and raises. That ended
EngineCore with all its requests (vLLM 0.28 to 0.32, torch 2.13). It took one request with a
``seed`` and a prompt that did not fit into one step.
"""

from __future__ import annotations

import sys
from typing import Any


def make_generator(generator: Any) -> Any:
    """Return a class like PyTorch's ``Generator`` in which winding back, by any offset, starts from the beginning.

    That is exact for a prompt that has not been read: vLLM discards everything drawn before. A
    preempted request is the exception, because vLLM keeps its tokens: it continues with the first
    random numbers again.
    """

    def set_offset(self: Any, offset: int) -> None:
        del offset  # relative to the result of get_offset, which means nothing here
        self.manual_seed(self.initial_seed())

    def get_offset(self: Any) -> int:
        del self
        return 0

    return type("Generator", (generator,), {"get_offset": get_offset, "set_offset": set_offset})


class Worker:
    """Empty: vLLM imports this module in the worker's process, and the import is the effect."""


if "torch" in sys.modules:  # vLLM's worker makes its generators as torch.Generator
    sys.modules["torch"].Generator = make_generator(sys.modules["torch"].Generator)  # type: ignore[attr-defined]
