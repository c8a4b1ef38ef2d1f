"""The executor of the targets: the argument that asks for it, and the one that really runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ARGUMENT = "distributed_executor_backend"
# On a CPU, vLLM replaces `uni` by `mp`, in its engine and its server. It keeps the path of the
# class.
SPELLINGS = {"uni": "vllm.v1.executor.uniproc_executor.UniProcExecutor", "mp": "mp"}
CHOICES = (*SPELLINGS, "default")
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")


def argument(choice: str, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine argument that gives all targets the executor ``choice``.

    Args:
        choice: one of ``CHOICES``. ``default`` gives no argument, so that each target has its own.
        engine: the engine arguments. An executor that they name stays.
    """
    if choice == "default" or ARGUMENT in engine:
        return {}
    # `uni` can run only one worker.
    if any(int(engine.get(size, 1)) > 1 for size in _SIZES):
        choice = "mp"
    return {ARGUMENT: SPELLINGS[choice]}


def executor_of(roles: Mapping[str, float]) -> str:
    """Return the executor of a started target.

    Args:
        roles: number of the target's processes by role.
    """
    # Judged by the processes, because vLLM may replace the executor that the argument names.
    if workers := roles.get("worker"):
        return f"mp ({workers:.0f} worker process{'es' if workers > 1 else ''})"
    if "engine_core" not in roles:
        return "unknown (no EngineCore found)"
    return "uni (worker inside EngineCore)"
