"""What the kernel says about a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from support.patience import wait_for
from triton_vllm.base.processes import is_stopped, start_time

STOP = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP); input()"
TRACED = f"import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0); {STOP}"  # 0 is PTRACE_TRACEME: the parent is the debugger


@pytest.mark.parametrize("code", [STOP, TRACED], ids=["SIGSTOP", "debugger"])
def test_a_process_that_stands_still(code):
    """A debugger holds a process in a state of its own."""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        try:
            wait_for(lambda: is_stopped(process.pid), "the stop")
            assert start_time(process.pid)
            if code == STOP:
                process.send_signal(signal.SIGCONT)
                wait_for(lambda: not is_stopped(process.pid), "the process that goes on")
        finally:
            # The parent of a traced process hears of its stop first, which `Popen` takes for its end.
            os.kill(process.pid, signal.SIGKILL)
            while os.WIFSTOPPED(os.waitpid(process.pid, 0)[1]):
                pass
    assert not is_stopped(process.pid)


def test_a_process_that_runs_and_one_that_is_gone():
    """Neither stands still."""
    assert not is_stopped(os.getpid())
    assert not is_stopped(2**31 - 1)
