"""The processes of an engine, here real ones that sleep."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys

import psutil
import pytest

from support.patience import wait_for
from triton_vllm.engine import processes
from triton_vllm.engine.processes import Processes

SLEEP = "import time; time.sleep(600)"
CONTEXT = multiprocessing.get_context("spawn")


def core(pipe, resource_tracker=""):
    """Start a worker, and sleep, as EngineCore does."""
    worker = subprocess.Popen([sys.executable, "-c", SLEEP, resource_tracker])
    pipe.send(worker.pid)
    signal.pause()


def started(*arguments):
    """Return EngineCore and its worker."""
    ours, theirs = CONTEXT.Pipe()
    engine = CONTEXT.Process(target=core, args=(theirs, *arguments), daemon=True)
    engine.start()
    return engine, psutil.Process(ours.recv())


@pytest.fixture
def other():
    """A process of the model that is not the engine's."""
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as process:
        yield process
        process.kill()


def test_what_a_killed_engine_leaves_is_ended(other):
    """Its worker has lost its parent; another process of the model goes on."""
    seen = Processes()
    with seen.noting():
        engine, worker = started()
    engine.kill()
    engine.join()
    assert worker.is_running()
    seen.end()
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    assert other.poll() is None
    seen.end()  # none is left


def test_a_start_that_fails(monkeypatch):
    """The worker of an EngineCore that dies in the middle of a start is known, too."""
    monkeypatch.setattr(processes, "_PERIOD_S", 0.01)
    seen = Processes()
    with seen.noting():
        engine, worker = started()
        wait_for(lambda: worker in seen._seen, "a look")
        engine.kill()
        engine.join()
    assert worker.is_running()
    seen.end()
    wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "its end")


def test_pythons_resource_tracker_ends_by_itself():
    """It still has to remove shared memory."""
    seen = Processes()
    with seen.noting():
        engine, tracker = started("resource_tracker")
    engine.kill()
    engine.join()
    seen.end()
    assert tracker.status() != psutil.STATUS_ZOMBIE
    os.kill(tracker.pid, signal.SIGKILL)
