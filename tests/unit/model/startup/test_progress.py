"""A load that takes long says what it is doing."""

from __future__ import annotations

import threading

from support.patience import LIMIT
from triton_vllm.startup.progress import Progress


class Log:
    """Lets a test wait for lines."""

    def __init__(self):
        self.lines = []
        self.said = threading.Semaphore(0)

    def info(self, text):
        self.lines.append(text)
        self.said.release()

    warning = error = info


def test_the_phase_is_repeated_until_the_load_has_ended():
    """Each phase is named once, then again every period; after the end the thread is gone."""
    log = Log()
    progress = Progress(log, period_s=0.01)
    progress.phase("importing vLLM")  # named before the first period may end
    with progress:
        for _ in range(3):
            assert log.said.acquire(timeout=LIMIT)
    count = len(log.lines)
    assert not progress._thread.is_alive()
    assert log.lines[0] == "importing vLLM"
    assert all(line.startswith("still importing vLLM (") for line in log.lines[1:])
    assert len(log.lines) == count
