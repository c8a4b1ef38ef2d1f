"""loadtest.calibrate: what the client saw, less what the model did."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import client
from loadtest import calibrate
from loadtest.calibrate import Calibration
from loadtest.errors import ClientError
from loadtest.record import Outcome, Record, Request
from support.patience import LIMIT, wait_for
from support.repositories import client_command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

REQUEST = Request(0, "x", {}, stream=True)


def answer(text: str, times: list[float]) -> Record:
    record = Record(REQUEST, due=10.0, sent=10.0, times=times, outcome=Outcome.ANSWERED)
    record.pieces = [[text]]
    return record


def test_the_error_is_what_the_client_adds() -> None:
    """Half a millisecond to the model and 1 ms back; one of two pieces is 10 ms late."""
    calibration = Calibration()
    for late in (0.0, 0.0, 0.0, 0.01):
        calibration.add(answer("10.0005 10.0605 10.0755", [10.0615, 10.0765 + late]))
    lines = calibration.lines()
    assert lines[0] == ("TTFT: p50 61.50 ms, in the model 60.00 ms; error p50 +1.50 ms, p99 1.50 ms: exact to 2 ms or 5 %")
    assert lines[1].startswith("ITL: p50 15.00 ms, in the model 15.00 ms; error p50 +0.00 ms, p99 9.70 ms")
    assert lines[3] == "Of this, p50 0.50 ms to the model and 1.00 ms back, through Triton"
    calibration = Calibration()
    calibration.add(answer("10.001 10.021", [10.026]))
    assert calibration.lines()[0].endswith("error p50 +6.00 ms, p99 6.00 ms: off by more than 2 ms and 5 %")


def test_an_answer_that_lacks_a_piece_is_no_measurement() -> None:
    """The pieces of both sides must be the same ones."""
    with pytest.raises(ClientError, match="the model sent 2 pieces, and 1 came"):
        Calibration().add(answer("10.0 10.1 10.2", [10.3]))
    failed = Record(REQUEST, due=0.0, sent=0.0)
    failed.fail("connection", "it is gone")
    with pytest.raises(ClientError, match="it is gone"):
        Calibration().add(failed)


def test_without_a_tritonserver_the_remedy_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, as for a wrong flag; so it is for a folder that holds no model."""
    assert client.main(["--calibrate", "--tritonserver", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"error: there is no tritonserver at {tmp_path / 'none'}, and --calibrate needs one; run ./gen_vllm_env"
    )
    assert client.main(["--calibrate", str(tmp_path), "--tritonserver", os.devnull]) == 2
    assert "there is no tritonserver" in capsys.readouterr().err
    program = tmp_path / "tritonserver"
    program.write_text("#!/bin/sh\necho it has no licence >&2\nexit 3\n")
    assert client.main(["--calibrate", str(tmp_path), "--tritonserver", str(program)]) == 2
    assert f"cannot read {tmp_path / 'config.pbtxt'}: No such file" in capsys.readouterr().err
    (tmp_path / "config.pbtxt").touch()
    assert client.main(["--calibrate", str(tmp_path), "--tritonserver", str(program)]) == 2
    assert f"{program} cannot be started: Permission denied" in capsys.readouterr().err
    program.chmod(0o755)
    assert client.main(["--calibrate", str(tmp_path), "--tritonserver", str(program)]) == 1
    assert "tritonserver ended with status 3; its last lines: it has no licence" in capsys.readouterr().err


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A server that is never ready, next to a model's configuration and to the file with its process id."""
    (tmp_path / "config.pbtxt").touch()
    program = tmp_path / "tritonserver"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/new\nmv {tmp_path}/new {tmp_path}/pid\nexec sleep 600\n")
    program.chmod(0o755)
    return program


def test_a_client_that_is_told_to_end_ends_its_server(tmp_path: Path, program: Path) -> None:
    """SIGTERM, as from a supervisor: no server and no folder is left."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = client_command("--calibrate", str(tmp_path), "--tritonserver", str(program))
    running = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(temporary)}, stdout=subprocess.DEVNULL)
    wait_for((tmp_path / "pid").exists, "the server")
    running.send_signal(signal.SIGTERM)
    assert running.wait(LIMIT) == 130
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()
    assert not list(temporary.iterdir())


class Client:
    """Gets a signal where gRPC would be at work, and counts how often it goes on. A cancelled call has failed."""

    def __init__(self, where: str, number: signal.Signals) -> None:
        self.where = where
        self.number = number
        self.signals = self.went_on = 0

    @contextlib.asynccontextmanager
    async def connected(self, _: object) -> AsyncIterator[Client]:
        self.at("connect")
        yield self

    def at(self, where: str) -> None:
        if self.where == where:
            self.signals += 1
            os.kill(os.getpid(), self.number)
            self.went_on += 1

    async def require_model(self, _: object) -> None:
        if self.where == "connect":
            raise ClientError("it is not ready")

    async def ask(self, _: Request, record: Record) -> None:
        self.at("ask")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)
        record.fail("connection", "it is gone")


@pytest.mark.parametrize("where", ["connect", "ask"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_raises_nothing_inside_grpc(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: signal.Signals
) -> None:
    """An exception there can end the program with SIGSEGV. The program ends as after Ctrl-C."""
    asked = Client(where, number)
    monkeypatch.setattr(calibrate, "client_for", lambda _: asked.connected)
    options = argparse.Namespace(calibrate=tmp_path, tritonserver=program, max_concurrency=None, num_prompts=None)
    # under nohup, pytest itself ignores SIGHUP
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            calibrate.calibrate(options)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert asked.went_on == asked.signals > 0


def test_what_the_user_ignores_is_ignored() -> None:
    """As nohup has it for SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals = calibrate._Signals()
        with signals.noted():
            os.kill(os.getpid(), signal.SIGHUP)
        assert not signals.came
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
