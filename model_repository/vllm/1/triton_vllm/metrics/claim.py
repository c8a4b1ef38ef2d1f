"""Whose the metrics of a model are: those of an only instance, which takes them away, or of several, which leave them.

Triton's core has metrics of equal labels once, and takes them away with the first owner that drops them; what another owner then
raises is freed memory (core, src/metric_family.cc: each owner's family counts its own). A reload starts the new instance before
it ends the old one, so an instance makes no metrics before it has the claim. The kernel frees the claim of a process that dies,
whose metrics the server keeps and gives to the next owner.
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

PLACE = Path("/dev/shm")  # noqa: S108 - the same for all instances, and without it there is no stub
_NAME = "vllm_env_{}_metrics"  # `gen_vllm_env.sh clean` knows such names


class Claim:
    """A lock on the metrics of a model in a server; of instances that share it all are given it at the same time.

    Args:
        args: what Triton hands to `initialize`.
        server: the process id of tritonserver.
        log: told if the metrics wait.
        place: where the file of the lock is.
    """

    def __init__(self, args: Mapping[str, str], server: int, log: Log, place: Path = PLACE) -> None:
        said = json.dumps([process_space(), server, start_time(server), args["model_name"], args["model_version"]])
        self.shared = instances(args) != 1
        self._path = place / _NAME.format(hashlib.sha256(said.encode()).hexdigest()[:12])
        self._log = log
        self._waits = False
        self._held: int | None = None
        for path in place.glob(_NAME.format("*")):  # of servers that were killed
            _remove(path)

    def take(self) -> bool:
        """Return whether the claim is this instance's; it is from now on if no other one stands against it.

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
        """Leave the claim to the next; the last one removes the file."""
        if self._held is None:
            return
        locks.free(self._held)
        self._held = None
        _remove(self._path)


def instances(args: Mapping[str, str]) -> int:
    """Return how many instances the model of Triton's `args` has on all devices."""
    groups = json.loads(args["model_config"]).get("instance_group") or [{}]
    return sum(int(group.get("count", 1)) * max(len(group.get("gpus") or ()), 1) for group in groups)


def _remove(path: Path) -> None:
    """Remove a file whose lock nobody holds."""
    with contextlib.suppress(OSError):
        held = locks.take(path)
        try:
            path.unlink()
        finally:
            locks.free(held)
