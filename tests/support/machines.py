"""Two machines of one engine, on this one: a server of Triton's, and `1/node.py` of the same model's folder."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import psutil

from support.patience import wait_for
from support.repositories import point_to_environment
from support.serving import CPU_ARGUMENTS, READY_SECONDS, STALL_SECONDS, variables_for
from support.starts import TRITON, note_start
from vllm_env.serve.processes import is_alive
from vllm_env.serve.server import Launch, TritonServer, free_ports
from vllm_env.serve.smoke import copy_model, set_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from support.serving import Parts


class Machines:
    """The model's folder, and what runs of it.

    Args:
        parts: what to serve.
        folder: gets the model and the logs.
        engine_args: further engine arguments.
    """

    def __init__(self, parts: Parts, folder: Path, engine_args: Mapping[str, object] | None = None) -> None:
        self._parts = parts
        self._model = folder / "models" / "vllm"
        self._log = folder / "server.log"
        self.node_log = folder / "node.log"
        several = {"tensor_parallel_size": 2, "nnodes": 2, "master_port": free_ports().http}
        # vLLM's own all-reduce fails here: for two ranks on one host it looks for both GPUs, and each process sees one (0.33).
        several |= {"disable_custom_all_reduce": True}
        self._arguments = {"model": str(parts.standin), **CPU_ARGUMENTS, **several, **(engine_args or {})}
        copy_model(parts.model, self._model)
        set_arguments(self._model, self._arguments)
        point_to_environment(self._model, parts.environment)
        self.node: subprocess.Popen[bytes] | None = None

    def server(self) -> TritonServer:
        """Return Triton's machine; a context manager starts it."""
        note_start(TRITON, self._arguments, engine=True)
        launch = Launch(self._variables(0), (), READY_SECONDS, STALL_SECONDS)
        return TritonServer(self._parts.binary, self._model.parent, log=self._log, launch=launch)

    def server_log(self) -> str:
        """Return what Triton's machine has logged."""
        return self._log.read_text(errors="replace")

    def start_node(self) -> None:
        """Start the other machine's program."""
        python = self._parts.environment / "bin" / "python"
        command = [str(python), str(self._model / "1" / "node.py"), "--rank", "1", "--leader", "127.0.0.1"]
        with self.node_log.open("ab") as log:
            variables = {**os.environ, **self._variables(1)}
            self.node = subprocess.Popen(command, stderr=log, stdout=log, env=variables, cwd="/")

    def node_processes(self) -> list[psutil.Process]:
        """Return the other machine's processes."""
        assert self.node is not None
        try:
            program = psutil.Process(self.node.pid)
            return [program, *program.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def end_node(self, number: int) -> None:
        """Send a signal to the other machine's program; return once all its processes have ended."""
        found = self.node_processes()
        if self.node is None:
            return
        self.node.send_signal(number)
        self.node.wait(READY_SECONDS)
        wait_for(lambda: not [one for one in found if is_alive(one)], lambda: f"the end of {found}")

    def close(self) -> None:
        """End the other machine's program."""
        if self.node is not None and self.node.poll() is None:
            self.end_node(signal.SIGTERM)

    def _variables(self, number: int) -> dict[str, str]:
        """Return those of a machine: each has a core, or a GPU, of its own."""
        here = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        own = {"VLLM_CPU_OMP_THREADS_BIND": str(number), "CUDA_VISIBLE_DEVICES": str(number)}
        return {**variables_for(self._arguments), **here, **own}
