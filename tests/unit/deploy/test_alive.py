"""``alive.sh``: with processes of Triton's names, as each release leaves them; tests/e2e/test_kubernetes.py has real ones."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.manifests import KUBERNETES
from support.namespaces import with_own_processes

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = KUBERNETES / "probes" / "alive.sh"
# Process 1, as in a container. What it does is in its arguments; it looks after each, and prints how the script ended.
_SERVER = """
import os, signal, subprocess, sys
from pathlib import Path

def call(name):
    Path("/proc/self/comm").write_text(name)

def child(name, first=lambda: None):
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        call(name)
        first()
        os.write(writing, b"x")
        signal.pause()
    os.read(reading, 1)
    return process

def kill(process):
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)  # and leave it a zombie

call("tritonserver")
stubs = []
for step in sys.argv[2:]:
    if step == "start":
        stubs.append(child("triton_python_b"))
    elif step == "start with a dead engine":
        stubs.append(child("triton_python_b", lambda: kill(child("triton_python_b"))))
    elif step == "kill":
        kill(stubs[-1])
    elif step == "collect":
        os.waitpid(stubs.pop(), 0)
    elif step == "ask":
        done = subprocess.run(["bash", sys.argv[1]], stderr=subprocess.PIPE, text=True)
        print(done.returncode, done.stderr.strip().rstrip("0123456789"), flush=True)
"""


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (["start", "ask", "start", "ask"], ["0", "0"]),
        (["start", "ask", "kill", "ask"], ["0", "1 a stub is dead: process"]),
        (["start", "kill", "ask"], ["1 a stub is dead: process"]),
        (["start", "start", "ask", "kill", "collect", "ask", "ask"], ["0", *["1 a stub is gone: process"] * 2]),
        (["start with a dead engine", "ask", "ask"], ["0", "0"]),
    ],
    ids=["alive", "before 26.03", "before the first look", "one of two, since 26.03", "an engine is none"],
)
def test_a_dead_stub_is_seen(steps: list[str], said: list[str], tmp_path: Path) -> None:
    """And no dead engine."""
    script = tmp_path / "alive.sh"
    script.write_text(SCRIPT.read_text("utf-8").replace("/tmp/", f"{tmp_path}/"))
    argv = [*with_own_processes(), sys.executable, "-c", _SERVER, script, *steps]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert [line.strip() for line in done.stdout.splitlines()] == said


def test_a_container_that_starts_again_has_other_stubs(tmp_path: Path) -> None:
    """/tmp is the pod's and outlives it."""
    script = tmp_path / "alive.sh"
    script.write_text(SCRIPT.read_text("utf-8").replace("/tmp/", f"{tmp_path}/"))
    for steps in (["start", "start", "ask"], ["start", "ask"]):
        argv = [*with_own_processes(), sys.executable, "-c", _SERVER, script, *steps]
        assert subprocess.check_output(argv, text=True).split() == ["0"]
    assert len(list(tmp_path.glob("stubs-of-*"))) == 2
