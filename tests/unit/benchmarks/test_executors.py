"""All targets are asked for one executor, and the report says which one runs, from the processes."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from support.patience import wait_for

UNI = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def titles(session: int) -> set[str]:
    """Return the first word of the command line of each process of a session; in the middle of an exec there is none."""
    from harness import processes

    return {word for process in processes.session_of(session) for word in process.cmdline()[:1]}


@pytest.mark.parametrize(
    ("choice", "engine", "expected"),
    [
        ("uni", {}, UNI),
        ("uni", {"tensor_parallel_size": 2}, "mp"),
        ("uni", {"pipeline_parallel_size": "2"}, "mp"),
        ("mp", {}, "mp"),
        ("default", {}, None),
        ("uni", {"distributed_executor_backend": "mp"}, None),
    ],
)
def test_what_is_asked_for(choice: str, engine: dict[str, Any], expected: str | None) -> None:
    """The path of the class, because vLLM takes `uni` for `mp` on a CPU; what the engine arguments name stays."""
    from harness import executors

    assert executors.argument(choice, engine).get(executors.ARGUMENT) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["VLLM::EngineCore"], "uni (worker inside EngineCore)"),
        (["VLLM::EngineCore", "VLLM::Worker"], "mp (1 worker process)"),
        (["VLLM::EngineCore", "VLLM::Worker_TP0", "VLLM::Worker_TP1"], "mp (2 worker processes)"),
        (["VLLM::EngineCore", "VLLM::APIServer"], "uni (worker inside EngineCore)"),
        ([], "unknown (no EngineCore found)"),
    ],
)
def test_what_runs_is_read_from_the_processes(names: list[str], expected: str) -> None:
    """Whatever the arguments say: processes with the titles that vLLM gives them, in a session of their own."""
    from harness import executors, processes

    started = " ".join(f"(exec -a {name} sleep 600) &" for name in names)
    server = subprocess.Popen(
        ["bash", "-c", f"{started} echo started; sleep 600; true"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert server.stdout
    try:
        assert server.stdout.readline() == b"started\n"
        wait_for(lambda: set(names) <= titles(server.pid), "the processes")
        assert executors.executor_of(processes.by_role(server.pid, lambda _: 1)) == expected
    finally:
        processes.end_session(server.pid, patience_s=0)
        server.wait()
        server.stdout.close()
    wait_for(lambda: not processes.session_of(server.pid), "the end of all that the server started")
