"""What a server may leave behind on a machine that other work shares."""

from __future__ import annotations

from pathlib import Path

from vllm_env.serve.processes import processes

_NAMES = ("tritonserver", "triton_python_b", "VLLM::")


def leftovers(parent: int) -> set[str]:
    """Returns processes below ``parent``, servers' orphans, and folders and shared memory of our servers.

    An orphan of somebody else's server counts as well: compare with an earlier look.
    """
    everyone = {process.pid: process for process in processes() if not process.zombie}
    below = {parent}
    while children := {p.pid for p in everyone.values() if p.parent in below} - below:
        below |= children
    ours = {p for p in everyone.values() if p.pid in below - {parent}}
    orphans = {p for p in everyone.values() if p.parent == 1 and p.name.startswith(_NAMES)}
    names = {str(process) for process in ours | orphans}
    files = [*Path("/dev/shm").glob("vllm_env_*"), *Path("/tmp").glob("vllm_env_server_*")]
    return names | {str(path) for path in files}
