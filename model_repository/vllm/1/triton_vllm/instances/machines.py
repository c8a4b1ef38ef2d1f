"""Notice the loss of another machine of the engine."""

from __future__ import annotations

import time
from pathlib import Path

_PERIOD_S = 2.0
"""From one look at the connections to the next, s."""
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"


class Machines:
    """The other machines, seen by their connections to the store where all workers meet.

    A worker here runs the store, and each machine stays connected as long as it works for this
    engine. With NCCL, nothing else says that a machine is lost: the GPUs here would wait for it
    until ENGINE_TIMEOUT_SECONDS (seen on two H200 with vLLM 0.33, 30 November 2026).

    Args:
        port: the engine argument ``master_port``.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._joined: set[str] = set()
        self._looked_at = 0.0

    def note(self) -> None:
        """Remember who is connected, because the engine has just become ready."""
        self._joined = connected_to(self._port)

    def is_one_lost(self) -> bool:
        """Return whether one of those connections has ended; it looks every 2 s."""
        now = time.monotonic()
        if not self._joined or now - self._looked_at < _PERIOD_S:
            return False
        self._looked_at = now
        return not self._joined <= connected_to(self._port)


def connected_to(port: int) -> set[str]:
    """Return the remote ends of the connections to a port of this machine, as the kernel has them.

    Each is an address and a port, in hexadecimal digits (proc_net(5)).
    """
    ends = set()
    for table in _TABLES:
        try:
            lines = table.read_text("ascii").splitlines()[1:]
        # a kernel without IPv6
        except OSError:
            continue
        for line in lines:
            _, local, remote, state, *_ = line.split()
            if state == _ESTABLISHED and int(local.rpartition(":")[2], 16) == port:
                ends.add(remote)
    return ends
