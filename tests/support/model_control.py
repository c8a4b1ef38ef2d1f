"""Loads and unloads models on a server in explicit mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.triton_client import post

if TYPE_CHECKING:
    from vllm_env.serve.server import TritonServer

GIVEN_UP = "the server has given this load up"
"""The log says this if the machine stood still for a second: Triton 24.10 then takes the loading process for dead."""
SECONDS = 800.0  # below the limit of a test


def load(server: TritonServer, name: str = "vllm") -> tuple[int, str]:
    """Load a model, and again if the server has given the load up; return the status and the answer's text."""
    start = server.log.stat().st_size
    answer = _control(server, name, "load")
    if GIVEN_UP.encode() in server.log.read_bytes()[start:]:
        answer = _control(server, name, "load")
    return answer


def unload(server: TritonServer, name: str = "vllm") -> tuple[int, str]:
    """Unload a model; return the status and the answer's text."""
    return _control(server, name, "unload")


def _control(server: TritonServer, name: str, verb: str) -> tuple[int, str]:
    return post(server.http_url, f"/v2/repository/models/{name}/{verb}", {}, timeout=SECONDS)
