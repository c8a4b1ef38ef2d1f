"""The executor of the targets: the engine argument to set, and the executor that runs in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ARGUMENT = "distributed_executor_backend"
# On a CPU, vLLM replaces `uni` by `mp`, in its engine and its server. It keeps the path of the class.
SPELLINGS = {"uni": "vllm.v1.executor.uniproc_executor.UniProcExecutor", "mp": "mp"}
CHOICES = (*SPELLINGS, "default")
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")


def asked(choice: str, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine argument that gives all targets the executor ``choice``.

    The result is empty for ``default``, which leaves each target its own executor, and if ``engine`` already names one. An engine
    with several workers gets ``mp`` instead of ``uni``, which can run only one.
    """
    if choice == "default" or ARGUMENT in engine:
        return {}
    several = any(int(engine.get(size, 1)) > 1 for size in _SIZES)
    return {ARGUMENT: SPELLINGS["mp" if several and choice == "uni" else choice]}


def running(roles: Mapping[str, float]) -> str:
    """Return the executor of a started target, judged by its processes: with ``uni``, the worker is inside EngineCore.

    Args:
        roles: number of the target's processes by role.
    """
    if workers := roles.get("worker"):
        return f"mp ({workers:.0f} worker process{'es' if workers > 1 else ''})"
    if "engine_core" not in roles:
        return "unknown (no EngineCore found)"
    return "uni (worker inside EngineCore)"
