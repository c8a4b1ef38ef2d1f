"""The processes of a server's models: the stubs, and vLLM's engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.leftovers import name_of

if TYPE_CHECKING:
    import psutil

    from vllm_env.serve.server import TritonServer

# The kernel keeps the first 15 characters of a name.
_STUB = "triton_python_b"
_ENGINE = "VLLM::EngineCor"


def stubs(server: TritonServer) -> set[psutil.Process]:
    """Return the processes of the model's instances."""
    return _named(server, _STUB)


def engines(server: TritonServer) -> set[psutil.Process]:
    """Return the processes of vLLM's engines, without separate workers."""
    return _named(server, _ENGINE)


def _named(server: TritonServer, name: str) -> set[psutil.Process]:
    return {process for process in server.members() if name_of(process).startswith(name)}
