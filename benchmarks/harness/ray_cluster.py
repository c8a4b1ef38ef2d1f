"""A Ray cluster of several nodes on this host: each node is a raylet with an address and a temporary folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from harness import processes
from harness.servers import StartFailedError, free_port

_STORE_BYTES = 256 << 20
_PROBE_LIMIT_S = 40
_START_LIMIT_S = 90
_PROBE = """
import json, sys, ray
from ray._private import state
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(json.dumps({"nodes": ray.nodes(), "actors": list(state.actors().values())}, default=str))
"""


@dataclass(frozen=True)
class Actor:
    """A living actor: its class, process and the address of its node."""

    name: str
    pid: int
    node: str


class RayCluster:
    """Nodes at 127.0.0.2, 127.0.0.3 and so on, with one GPU each.

    Args:
        python: the environment's interpreter; Ray demands the same of both sides.
        logs: where each node's output goes.
        nodes: how many.
        gpus: whether the GPUs are real: node N then sees GPU N alone. Else Ray is told of one that is not there.
        variables: to set for each node; its actors inherit them.
    """

    def __init__(self, python: Path, logs: Path, nodes: int, variables: dict[str, str], *, gpus: bool) -> None:
        self._python = str(python)
        self._logs = logs
        self._nodes = nodes
        self._gpus = gpus
        # Ray's sockets lie below it, and the path of a socket has 107 characters at most
        self._folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
        # Each node takes the whole host's memory for its own, and kills workers when that is nearly used up
        self._variables = {**os.environ, **variables, "RAY_memory_monitor_refresh_ms": "0"}
        self._leaders: list[subprocess.Popen[bytes]] = []
        self.address = f"127.0.0.2:{free_port()}"

    def start(self) -> list[str]:
        """Start every node; return their addresses once all of them are up.

        Raises:
            StartFailedError: one did not come up in a minute and a half.
        """
        limit = time.monotonic() + _START_LIMIT_S
        self._start_node(0)
        while not self._listens() and time.monotonic() < limit:
            time.sleep(0.1)
        for index in range(1, self._nodes):
            self._start_node(index)
        while time.monotonic() < limit:
            with contextlib.suppress(subprocess.SubprocessError):  # the head's raylet is not there yet
                found = [node["NodeManagerAddress"] for node in self._probe()["nodes"] if node["Alive"]]
                if len(found) == self._nodes:
                    return sorted(found)
            time.sleep(0.5)
        raise StartFailedError(f"the Ray cluster did not come up; see {self._logs}/ray_*.log")

    def actors(self) -> list[Actor]:
        """Return the living actors, as Ray itself knows them.

        Raises:
            subprocess.SubprocessError: Ray did not answer.
        """
        living = [actor for actor in self._probe()["actors"] if actor["State"] == "ALIVE"]
        return [Actor(a["ActorClassName"], int(a["Pid"]), a["Address"]["IPAddress"]) for a in living]

    def stop(self) -> int:
        """End every process of the cluster, workers before the head; return how many were left after that."""
        left = 0
        for leader in reversed(self._leaders):
            # Ray's agents and workers stay in the session of the command that started the node, whoever their parent is
            processes.end_session(leader.pid, patience_s=8)
            leader.wait()
            limit = time.monotonic() + 5
            while processes.session_of(leader.pid) and time.monotonic() < limit:
                time.sleep(0.1)
            left += len(processes.session_of(leader.pid))
        self._leaders = []
        shutil.rmtree(self._folder, ignore_errors=True)
        return left

    def _start_node(self, index: int) -> None:
        address = f"127.0.0.{2 + index}"
        if index == 0:
            port = self.address.split(":")[1]
            role = ["--head", f"--port={port}", "--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
        else:
            role = [f"--address={self.address}"]
        command = [
            *(self._python, "-m", "ray.scripts.scripts", "start", "--block", *role),
            *(f"--node-ip-address={address}", f"--temp-dir={self._folder / str(index)}"),
            *("--num-gpus=1", "--num-cpus=2", f"--object-store-memory={_STORE_BYTES}", "--disable-usage-stats"),
            # two raylets of one host must not try for the same ports; 0 lets the system choose
            *("--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={free_port()}"),
        ]
        variables = {**self._variables, "VLLM_HOST_IP": address}
        if self._gpus:
            variables["CUDA_VISIBLE_DEVICES"] = str(index)
        log: IO[bytes]
        with (self._logs / f"ray_{index}.log").open("wb") as log:
            # Python looks into the working folder first, where this repository has packages of common names
            node = subprocess.Popen(command, stdout=log, stderr=log, env=variables, cwd=self._folder, start_new_session=True)
        self._leaders.append(node)

    def _listens(self) -> bool:
        host, port = self.address.split(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return True
        return False

    def _probe(self) -> dict[str, Any]:
        done = subprocess.run(
            [self._python, "-c", _PROBE, self.address],
            capture_output=True,
            text=True,
            check=True,
            timeout=_PROBE_LIMIT_S,
            env=self._variables,
            cwd=self._folder,
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
