"""What a server's processes hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from support.leftovers import name_of

if TYPE_CHECKING:
    from vllm_env.serve.server import TritonServer

_LASTING = ("triton_python_b", "VLLM::")


def memory(server: TritonServer) -> dict[int, float]:
    """Return the resident megabytes of the stub and of vLLM's processes by pid; constraints are tried in others, which end."""
    children = psutil.Process(server.pid).children(recursive=True)
    return {p.pid: p.memory_info().rss / 1e6 for p in children if name_of(p).startswith(_LASTING)}
