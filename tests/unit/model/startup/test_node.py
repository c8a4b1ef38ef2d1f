"""`1/node.py` starts a machine's workers, and again each time that they or the leader's engine have ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from support.fake_log import FakeLog
from support.patience import LIMIT, wait_for
from triton_vllm.base.errors import ConfigError
from triton_vllm.startup.node import main
from triton_vllm.startup.prepare import prepare
from triton_vllm.startup.progress import Progress
from vllm_env.serve.processes import is_alive

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[4]
PYTHONPATH = os.pathsep.join(str(ROOT / folder) for folder in ("model_repository/vllm/1", "tests"))
# The workers note that they run, with a process of their own, and end when a file says so.
WORKERS = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"])
with open(sys.argv[1] + "/started", "a") as file:
    file.write(f"{os.getpid()} {child.pid}\\n")
while not os.path.exists(sys.argv[1] + "/end"):
    time.sleep(0.01)
os.remove(sys.argv[1] + "/end")
"""
SUPERVISE = """
import sys
from triton_vllm.startup.node import Log, Supervisor
place = {"master_addr": "127.0.0.1", "master_port": int(sys.argv[1])}
Supervisor(place, Log(1), [sys.executable, "-c", sys.argv[2], sys.argv[3]]).run()
"""


class Machine:
    """A supervisor in a process of its own, and the leader that it watches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.leader = socket.create_server(("127.0.0.1", 0))
        self.leader.settimeout(LIMIT)
        command = [sys.executable, "-c", SUPERVISE, str(self.leader.getsockname()[1]), WORKERS, str(folder)]
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
        self.supervisor = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def started(self, count: int) -> list[psutil.Process]:
        """Return the processes of the last start, once there were so many."""
        file = self.folder / "started"
        wait_for(lambda: file.exists() and file.read_text().count("\n") == count, f"{count} starts")
        found = []
        for pid in file.read_text().splitlines()[-1].split():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
                found.append(psutil.Process(int(pid)))
        return found

    def end(self) -> str:
        """End the supervisor in order; return what it has logged."""
        self.supervisor.send_signal(signal.SIGTERM)
        _, said = self.supervisor.communicate(timeout=LIMIT)
        assert self.supervisor.returncode == 0
        return said


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.supervisor.kill()
    machine.leader.close()


def ended(processes: list[psutil.Process]) -> bool:
    """Return whether all have ended."""
    return not any(map(is_alive, processes))


def test_the_workers_end_with_the_leaders_engine_and_start_again(machine):
    """All their processes; the end of the connection says so."""
    for count in (1, 2):
        workers = machine.started(count)
        link, _ = machine.leader.accept()
        link.close()
        wait_for(lambda workers=workers: ended(workers), "the workers' end")
    last = machine.started(3)
    said = machine.end()
    assert ended(last)
    assert said.count("[node 1] the leader's engine has ended; starting again") == 2


def test_workers_that_have_ended_start_again(machine):
    """What they have left is ended first."""
    first = machine.started(1)
    (machine.folder / "end").touch()
    wait_for(lambda: ended(first), "the workers' end")
    machine.started(2)
    assert "vLLM has ended with status 0; starting again" in machine.end()


@pytest.mark.parametrize(
    ("arguments", "values", "told"),
    [
        (["--rank", "1"], {}, "vllm_engine_args.json is for one machine: set nnodes to the number of machines"),
        (["--rank", "2"], {"nnodes": 2}, "nnodes is 2, so --rank must be from 1 to 1, not 2; Triton's machine is 0"),
        (["--rank", "0"], {"nnodes": 3}, "nnodes is 3, so --rank must be from 1 to 2, not 0"),
        (["--rank", "1"], {"nnodes": 2}, "--leader: name the address of Triton's machine"),
        (["--rank", "1"], {"nnodes": 2, "data_parallel_size": 2}, "a model here has one data-parallel rank"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments, values, told, tmp_path, capsys, monkeypatch):
    """Before anything is started."""
    monkeypatch.delenv("LWS_LEADER_ADDRESS", raising=False)
    (tmp_path / "1").mkdir()
    whole: dict[str, Any] = {"model": "x", **values}
    (tmp_path / "vllm_engine_args.json").write_text(json.dumps(whole))
    assert main(tmp_path / "1", arguments) == 1
    assert told in capsys.readouterr().err


def test_a_leader_worker_set_says_which_machine_this_is(tmp_path, capsys, monkeypatch):
    """In its variables; the command line comes first."""
    monkeypatch.setenv("LWS_WORKER_INDEX", "7")
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "vllm-0.vllm")
    (tmp_path / "1").mkdir()
    (tmp_path / "vllm_engine_args.json").write_text('{"model": "x", "nnodes": 2}')
    assert main(tmp_path / "1", []) == 1
    assert "--rank must be from 1 to 1, not 7" in capsys.readouterr().err


def test_an_engine_on_several_machines_has_one_front_end(tmp_path):
    """The load says what to change, before vLLM is imported."""
    (tmp_path / "1").mkdir()
    (tmp_path / "vllm_engine_args.json").write_text('{"model": "x", "nnodes": 2}')
    args = {"model_name": "m", "model_version": "1", "model_repository": str(tmp_path), "model_config": "{}"}
    shared: Any = "the other instances"
    with pytest.raises(ConfigError, match=r"nnodes in vllm_engine_args\.json\) has one front end; use count: 1"):
        prepare(args, FakeLog(), Progress(FakeLog()), shared)
