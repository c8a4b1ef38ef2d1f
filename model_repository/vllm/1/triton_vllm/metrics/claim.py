"""Decide which instance owns a model's metrics.

Triton's core keeps metrics with equal labels only once, and deletes them when the first owner drops
them. Another owner that then raises one writes to freed memory (core, src/metric_family.cc: each
owner's family counts only its own). A reload starts the new instance before it ends the old one. So
an instance makes no metrics before it has the claim.

A single instance removes its metrics at its end. Several instances leave them. If a process dies,
the kernel frees its claim. The server keeps that process's metrics and gives them to the next
owner.
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

# The folder is the same for all instances, and no stub runs without it.
LOCKS_FOLDER = Path("/dev/shm")  # noqa: S108
# `gen_vllm_env.sh clean` removes files with such names.
_LOCK_NAME = "vllm_env_{}_metrics"


class Claim:
    """A lock on the metrics of a model in a server; several instances of the model share it.

    Args:
        args: the arguments that Triton passes to ``initialize``.
        server: the process id of tritonserver.
        log: reports that the metrics must wait.
        place: the folder of the lock's file.

    Attributes:
        shared: whether other instances may have the claim at the same time.
    """

    def __init__(
        self, args: Mapping[str, str], server: int, log: Log, place: Path = LOCKS_FOLDER
    ) -> None:
        # A later server may get the process id of this one, so its start time belongs to the key.
        identity = json.dumps(
            [process_space(), server, start_time(server), args["model_name"], args["model_version"]]
        )
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        self.shared = instances(args) > 1
        self._path = place / _LOCK_NAME.format(digest)
        self._log = log
        # Whether it has been logged that the metrics wait.
        self._waits = False
        # The lock's descriptor; None without the claim.
        self._lock: int | None = None
        # Servers that were killed have left theirs.
        for path in place.glob(_LOCK_NAME.format("*")):
            _remove_unheld(path)

    def take(self) -> bool:
        """Take the claim unless another instance holds it; return whether this instance has it.

        Raises:
            OSError: the file cannot be made.
        """
        if self._lock is None:
            try:
                self._lock = locks.take(self._path, shared=self.shared)
            except BlockingIOError:
                # Logged once, because the caller tries again at each update.
                if not self._waits:
                    self._waits = True
                    self._log.info(
                        "metrics wait until another instance with this model's name and version "
                        "has removed its own"
                    )
        return self._lock is not None

    def give_up(self) -> None:
        """Free the claim for the next instance; the last one removes the file."""
        if self._lock is not None:
            locks.free(self._lock)
            self._lock = None
            _remove_unheld(self._path)


def instances(args: Mapping[str, str]) -> int:
    """Return how many instances the model of Triton's ``args`` has on all devices."""
    total = 0
    for group in json.loads(args["model_config"]).get("instance_group") or [{}]:
        # Triton starts `count` instances on each GPU of the group.
        gpus = group.get("gpus") or [0]
        total += int(group.get("count", 1)) * len(gpus)
    return total


def _remove_unheld(path: Path) -> None:
    """Remove a lock's file if no process holds the lock."""
    with contextlib.suppress(OSError):
        lock = locks.take(path)
        try:
            path.unlink()
        finally:
            locks.free(lock)
