"""Let vLLM wind back its random numbers on a CPU (engine argument ``worker_extension_cls``).

When vLLM has read a part of a prompt, it samples a token and discards it. Then it winds the
request's generator back by an offset. PyTorch's generator for CPUs has no offset and raises. That
ended EngineCore with all its requests (vLLM 0.28 to 0.32, torch 2.13). It took one request with a
``seed`` and a prompt that did not fit into one step.
"""

from __future__ import annotations

import sys
from typing import Any


def make_generator(generator: Any) -> Any:
    """Return a subclass of PyTorch's ``Generator`` whose ``set_offset`` starts it again.

    That is exact for a prompt that has not been read: vLLM discards everything drawn before. A
    preempted request is the exception, because vLLM keeps its tokens: it continues with the first
    random numbers again.
    """

    def set_offset(self: Any, offset: int) -> None:
        # The offset is relative to the result of `get_offset`, which means nothing here.
        del offset
        self.manual_seed(self.initial_seed())

    def get_offset(self: Any) -> int:
        del self
        return 0

    return type("Generator", (generator,), {"get_offset": get_offset, "set_offset": set_offset})


class Worker:
    """Empty: vLLM imports this module in the worker's process, and the import is the effect."""


# Patch generators-on-a-cpu: vLLM's worker makes its generators as torch.Generator and calls
# `set_offset` (since 0.28; v1/worker/gpu_model_runner.py, _bookkeeping_sync), which raises on a CPU
# (pull request 98965 of PyTorch). It may go when vLLM no longer calls it there, as it does not on
# an XPU (vLLM's pull request 43028).
if "torch" in sys.modules:
    torch: Any = sys.modules["torch"]
    torch.Generator = make_generator(torch.Generator)
