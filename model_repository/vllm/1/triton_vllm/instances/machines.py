"""Notice the loss of another machine of the engine."""

from __future__ import annotations

import threading
import time
from pathlib import Path

_PERIOD_S = 2.0
"""From one look at the connections to the next, s."""
_LOOKS = 2
"""A machine is lost when a connection is missing in this many looks one after another."""
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"


class Machines:
    """The other machines, seen by their connections to the store where all workers meet.

    A worker here runs the store, and each worker stays connected as long as it works for this
    engine. With NCCL, nothing else says that a machine is lost: the GPUs here would wait for it
    until ENGINE_TIMEOUT_SECONDS (seen on two H200 with vLLM 0.33, 30 November 2026).

    Args:
        port: the engine argument ``master_port``.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        # Engines are numbered from 1 on. 0: none has started.
        self._engine = 0
        # The number of the engine that has lost a machine. 0: none has.
        self._lost = 0

    def note(self) -> None:
        """Watch the connections that are there now: the engine has just become ready."""
        self._engine += 1
        joined = connected_to(self._port)
        if joined:
            arguments = (joined, self._engine)
            threading.Thread(
                target=self._watch, args=arguments, name="triton-machines", daemon=True
            ).start()

    def is_one_lost(self) -> bool:
        """Return whether one of those connections has ended."""
        return self._lost > 0 and self._lost == self._engine

    def _watch(self, joined: set[str], engine: int) -> None:
        """Look until a connection is missing, or another engine has come.

        In a thread of its own: with 28,000 connections of clients, a look takes 0.1 s.

        Args:
            joined: the remote ends of the connections.
            engine: the number of the engine.
        """
        missing = 0
        while missing < _LOOKS:
            time.sleep(_PERIOD_S)
            if engine != self._engine:
                return
            found = connected_to(self._port)
            # None says nothing: a table that cannot be read must not end the engine.
            missing = missing + 1 if found is not None and not joined <= found else 0
        self._lost = engine


def connected_to(port: int) -> set[str] | None:
    """Return the remote ends of the connections to a port of this machine, as the kernel has them.

    Each is an address and a port, in hexadecimal digits (proc_net(5)). None if the kernel's tables
    cannot be read, e.g. because this process has too many open files.
    """
    ends = set()
    wanted = f":{port:04X} "
    for table in _TABLES:
        try:
            lines = table.read_text("ascii").splitlines()
        # a kernel without IPv6
        except FileNotFoundError:
            continue
        except OSError:
            return None
        for line in lines:
            # Most lines are those of other connections.
            if wanted in line:
                _, local, remote, state, *_ = line.split()
                if state == _ESTABLISHED and local.endswith(wanted.strip()):
                    ends.add(remote)
    return ends
