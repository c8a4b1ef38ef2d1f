"""Run this machine's part of an engine that several machines share; ``1/node.py`` calls it.

vLLM's multi-node executor distributes the work. This program starts its workers of one machine,
watches the leader, ends them when the leader's engine ends, and starts them again for the next one.
Without it, they would wait for ever for a leader that was killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.errors import ConfigError
from triton_vllm.startup import devices, engine_args, guard
from triton_vllm.startup.prepare import prepare
from triton_vllm.startup.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PERIOD_S = 1.0
"""From one look at the workers to the next, s."""
CONNECT_S = 2.0
# vLLM terminates its workers in 4 s, and kills them then.
GRACE_S = 15.0
"""How long vLLM may take to end in order, s. Then it is killed."""
# A machine that loses its power sends no end of a connection.
KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""The leader's machine is lost after 20 s without a sign of life."""


class Log:
    """Takes log lines."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def info(self, text: str) -> None:
        """Log an event of normal operation."""
        sys.stderr.write(f"[node {self._rank}] {text}\n")
        sys.stderr.flush()

    warning = error = info


def main(version_dir: Path, arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status.

    Args:
        version_dir: the folder with ``node.py``, in the model's folder.
        arguments: the command line; that of this process if None.
    """
    options = _parser().parse_args(arguments)
    model_dir = version_dir.parent
    log = Log(options.rank)
    try:
        own_arguments = _machine_arguments(model_dir, version_dir, options)
        # A supervisor has started this process.
        if options.once:
            _run(model_dir, version_dir, own_arguments, log)
            return 0
        Supervisor(own_arguments, log, [sys.executable, *sys.argv, "--once"]).run()
    except ConfigError as error:
        # The text has the remedy; a traceback would add nothing.
        log.error(str(error))  # noqa: TRY400
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line.

    In a LeaderWorkerSet of Kubernetes, variables say which machine this is and who leads.
    """
    parser = argparse.ArgumentParser(
        prog="node.py",
        description="Run this machine's part of an engine that several machines share.",
    )
    parser.add_argument(
        "--rank",
        type=int,
        default=os.environ.get("LWS_WORKER_INDEX"),
        required="LWS_WORKER_INDEX" not in os.environ,
        help="the number of this machine, from 1 on; Triton's machine is 0. "
        "In a LeaderWorkerSet of Kubernetes it is known",
    )
    parser.add_argument(
        "--leader",
        metavar="ADDRESS",
        default=os.environ.get("LWS_LEADER_ADDRESS"),
        help="the address of Triton's machine, in place of the engine argument master_addr",
    )
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    return parser


def _machine_arguments(
    model_dir: Path, version_dir: Path, options: argparse.Namespace
) -> Mapping[str, str | int]:
    """Return the engine arguments that say which machine this is, and who leads.

    Raises:
        ConfigError: the model's engine arguments are not for several machines, or no leader is
            named.
    """
    values = engine_args.read(model_dir, version_dir)
    name = engine_args.place(model_dir, version_dir).relative_to(model_dir)
    machines = devices.machines(values)
    if machines == 1:
        raise ConfigError(f"{name} is for one machine: set nnodes to the number of machines")
    if not 0 < options.rank < machines:
        raise ConfigError(
            f"{name}: nnodes is {machines}, so --rank must be from 1 to {machines - 1}, not "
            f"{options.rank}; Triton's machine is 0"
        )
    if devices.parallel_sizes(values)["data"] > 1:
        raise ConfigError(
            f"{name}: data_parallel_size: over several machines, a model here has one data-parallel"
            " rank; use tensor_parallel_size and pipeline_parallel_size, or Ray"
        )
    leader = options.leader or values.get("master_addr")
    if not leader:
        raise ConfigError("--leader: name the address of Triton's machine")
    return {
        "node_rank": options.rank,
        "master_addr": leader,
        "master_port": devices.master_port(values),
    }


def _run(model_dir: Path, version_dir: Path, own_arguments: Mapping[str, Any], log: Log) -> None:
    """Run the workers, until one ends.

    Args:
        model_dir: the folder with ``config.pbtxt``.
        version_dir: the folder with ``node.py``.
        own_arguments: the engine arguments that say which machine this is.
        log: reports the phases of the load.
    """
    signal.signal(signal.SIGTERM, _exit)
    # As Triton passes them to a model; only their folder and version matter here.
    args = {
        "model_name": model_dir.name,
        "model_version": version_dir.name,
        "model_repository": str(model_dir),
        "model_config": json.dumps({}),
        "model_instance_kind": "MODEL",
        "model_instance_device_id": "0",
    }
    with Progress(log) as progress:
        prepared = prepare(args, log, progress)
        progress.phase("waiting for the leader and loading the model")
    vllm_api.run_node(prepared.vllm, {**prepared.engine_args, **own_arguments})


def _exit(*_: object) -> None:
    # vLLM ends its workers then.
    raise SystemExit(0)


class Supervisor:
    """Starts the workers again and again, each time for another engine of the leader.

    Args:
        own_arguments: the engine arguments that say which machine this is.
        log: reports each start and its reason.
        command: runs the workers.
    """

    def __init__(
        self, own_arguments: Mapping[str, str | int], log: Log, command: Sequence[str]
    ) -> None:
        self._leader = (str(own_arguments["master_addr"]), int(own_arguments["master_port"]))
        self._log = log
        self._command = command
        self._ends = False

    def run(self) -> None:
        """Run until SIGTERM or SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        # The workers end with this process, however it ends.
        guard.own()
        while not self._ends:
            # A session of its own: a terminal's Ctrl-C reaches only this process.
            workers = subprocess.Popen(self._command, start_new_session=True)
            try:
                reason = self._watch(workers)
            finally:
                _end(workers)
            if not self._ends:
                self._log.info(f"{reason}; starting again")
                time.sleep(PERIOD_S)

    def _end(self, *_: object) -> None:
        self._ends = True

    def _watch(self, workers: subprocess.Popen[bytes]) -> str:
        """Wait until the workers or the leader's engine have ended, and return a text that says so.

        It is empty if this program ends.
        """
        with contextlib.ExitStack() as stack:
            # The connection to the leader's engine; None until it is there.
            link: socket.socket | None = None
            while not self._ends:
                status = workers.poll()
                if status is not None:
                    return f"vLLM has ended with status {status}"
                if link is None:
                    link = self._connect(stack)
                    if link is None:
                        time.sleep(PERIOD_S)
                elif _has_ended(link):
                    return "the leader's engine has ended"
        return ""

    def _connect(self, stack: contextlib.ExitStack) -> socket.socket | None:
        """Connect to the store where all workers meet; return None if it is not there yet.

        A worker of the leader's engine runs the store. So the connection ends with that engine.
        """
        try:
            link = stack.enter_context(socket.create_connection(self._leader, CONNECT_S))
        except OSError:
            return None
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            link.setsockopt(socket.IPPROTO_TCP, option, value)
        return link


def _has_ended(link: socket.socket) -> bool:
    """Return whether the other end has closed the connection; it takes a second if not."""
    readable, _, _ = select.select([link], [], [], PERIOD_S)
    try:
        # A closed connection is readable, but has no byte.
        return bool(readable) and not link.recv(1)
    except OSError:
        return True


def _end(workers: subprocess.Popen[bytes]) -> None:
    """End vLLM and all its processes of this machine."""
    workers.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        workers.wait(GRACE_S)
    # Also what an orderly end has left.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(workers.pid, signal.SIGKILL)
    workers.wait()
