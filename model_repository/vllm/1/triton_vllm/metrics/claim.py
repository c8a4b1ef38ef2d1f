"""Decide which instance owns a model's metrics. A single instance removes them at its end; several instances leave them.

Triton's core keeps metrics with equal labels only once, and deletes them when the first owner drops
them. Another owner that then raises one writes to freed memory (core, src/metric_family.cc: each
owner's family counts only its own). A reload starts the new instance before it ends the old one. So
an instance makes no metrics before it has the claim. If a process dies, the kernel frees its claim.
The server keeps that process's metrics and gives them to the next owner.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from triton_vllm.base import locks
from triton_vllm.base.processes import process_space, start_time

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.base.protocols import Log

PLACE = Path("/dev/shm")  # noqa: S108 - the same for all instances, and no stub runs without it
_NAME = "vllm_env_{}_metrics"  # `gen_vllm_env.sh clean` removes files with such names


class Claim:
    """A lock on the metrics of a model in a server; if the model has several instances, all share it.

    Args:
        args: the arguments that Triton passes to `initialize`.
        server: the process id of tritonserver.
        log: reports that the metrics must wait.
        place: the folder of the lock's file.
    """

    def __init__(self, args: Mapping[str, str], server: int, log: Log, place: Path = PLACE) -> None:
        said = json.dumps(
            [process_space(), server, start_time(server), args["model_name"], args["model_version"]]
        )
        self.shared = instances(args) != 1
        self._path = place / _NAME.format(hashlib.sha256(said.encode()).hexdigest()[:12])
        self._log = log
        self._waits = False
        self._held: int | None = None
        for path in place.glob(_NAME.format("*")):  # files of servers that were killed
            _remove(path)

    def take(self) -> bool:
        """Take the claim unless another instance holds it; return whether this instance has it.

        Raises:
            OSError: the file cannot be made.
        """
        if self._held is None:
            try:
                self._held = locks.take(self._path, shared=self.shared)
            except BlockingIOError:
                if not self._waits:
                    self._waits = True
                    self._log.info(
                        "metrics wait until another instance with this model's name and version has taken its own away"
                    )
        return self._held is not None

    def give_up(self) -> None:
        """Free the claim for the next instance; the last one removes the file."""
        if self._held is None:
            return
        locks.free(self._held)
        self._held = None
        _remove(self._path)


def instances(args: Mapping[str, str]) -> int:
    """Return how many instances the model of Triton's `args` has on all devices."""
    groups = json.loads(args["model_config"]).get("instance_group") or [{}]
    return sum(
        int(group.get("count", 1)) * max(len(group.get("gpus") or ()), 1) for group in groups
    )


def _remove(path: Path) -> None:
    """Remove a lock's file if no process holds the lock."""
    with contextlib.suppress(OSError):
        held = locks.take(path)
        try:
            path.unlink()
        finally:
            locks.free(held)
