"""A pause while a model loads: Triton takes the stub for dead until 25.07, and server and stub must not wait for each other."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.engineless import GATE
from support.model_control import GIVEN_UP, PAUSE_SECONDS, TOLERATED_SINCE
from support.patience import pause, wait_for
from support.repositories import serves_since

if TYPE_CHECKING:
    from support.serving import Serve

pytestmark = pytest.mark.e2e
LOADS = "starting the engine and loading the model"


class Pause(threading.Thread):
    """Stops the stub for some seconds once its load has begun, as a pause of the machine would.

    An engine that starts at once would be ready before that: it waits for ``gate``, which is opened when the stub is gone, or
    after the pause if Triton tolerates it.
    """

    def __init__(self, gate: Path) -> None:
        super().__init__(daemon=True)
        self.gate = gate
        self.model: Path | None = None
        self.paused: int | None = None

    def prepare(self, model: Path) -> None:
        """Note whose stub is meant, and wait for it."""
        self.model = model
        self.start()

    def run(self) -> None:
        """Pause the stub."""
        assert self.model is not None
        log = self.model.parent.parent / "server.log"
        wait_for(lambda: log.exists() and LOADS in log.read_text(errors="replace"), "the load", longest_pause=0.05)
        stub = _stub(self.model)
        os.kill(stub, signal.SIGSTOP)
        pause(PAUSE_SECONDS)
        os.kill(stub, signal.SIGCONT)
        self.paused = stub
        try:
            if not serves_since(TOLERATED_SINCE):
                wait_for(lambda: not Path(f"/proc/{stub}").exists(), "the end of the stub", longest_pause=0.05)
        finally:
            self.gate.touch()


def _stub(model: Path) -> int:
    """Return the process id of the stub that loads the model."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        if words[0].endswith(b"triton_python_backend_stub") and any(word.startswith(os.fsencode(model)) for word in words):
            return int(process.name)
    raise AssertionError(f"no stub of {model}")


def test_the_server_ends_and_is_started_again(light_serving: Serve, no_leftovers: None, tmp_path: Path) -> None:
    """Before, server and stub waited for each other for ever; now the start fails with a reason, and the next one is well.

    A Triton that tolerates the pause goes on with the load.
    """
    pause = Pause(tmp_path / "gate")
    with light_serving(environment={GATE: str(pause.gate)}, prepare=pause.prepare) as server:
        assert pause.paused is not None
        said = server.log.read_text(errors="replace")
        if serves_since(TOLERATED_SINCE):
            assert Path(f"/proc/{pause.paused}").exists()
            assert GIVEN_UP not in said
            return
        assert not Path(f"/proc/{pause.paused}").exists()
        failed, _, again = said.partition(GIVEN_UP)
        assert "creating server: Internal - failed to load all models" in again
        assert "[vllm] ready after" not in failed
        assert "[vllm] ready after" in again
