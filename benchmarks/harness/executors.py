"""Which of vLLM's executors the targets have: what to ask for, and what runs in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ARGUMENT = "distributed_executor_backend"
# On a CPU vLLM takes `mp` where `uni` is asked for, by engine and server alike; the path of the class stays.
SPELLINGS = {"uni": "vllm.v1.executor.uniproc_executor.UniProcExecutor", "mp": "mp"}
CHOICES = (*SPELLINGS, "default")
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")


def asked(choice: str, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine argument that gives all targets the executor `choice`.

    Nothing for `default`, which leaves each target its own, and where `engine` names one. An engine of several workers
    has `mp` instead of `uni`, which runs one.
    """
    if choice == "default" or ARGUMENT in engine:
        return {}
    several = any(int(engine.get(size, 1)) > 1 for size in _SIZES)
    return {ARGUMENT: SPELLINGS["mp" if several and choice == "uni" else choice]}


def running(roles: Mapping[str, float]) -> str:
    """Return which executor a started target has, by its processes: `uni` runs the worker inside EngineCore.

    Args:
        roles: how many processes the target has of each role.
    """
    if workers := roles.get("worker"):
        return f"mp ({workers:.0f} worker process{'es' if workers > 1 else ''})"
    if "engine_core" not in roles:
        return "unknown (no EngineCore found)"
    return "uni (worker inside EngineCore)"
