"""The server: what is started, when it counts as ready, and that nothing of it stays."""

from __future__ import annotations

import dataclasses
import http.server
import json
import math
import re
import shutil
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import psutil
import pytest

from support import fake_tritonserver
from support.listener import Listener
from support.patience import LIMIT
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.process import start
from vllm_env.base.report import Console, reporting_to
from vllm_env.serve import identity
from vllm_env.serve import server as module
from vllm_env.serve.processes import is_alive
from vllm_env.serve.server import Launch, StuckStartError, TritonServer, free_ports
from vllm_env.triton.root import is_plain
from vllm_env.verify.together import together

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.long


@pytest.fixture
def binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A launcher like that of the provisioned Triton; a folder for temporary files of the test's own."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return fake_tritonserver.launcher(tmp_path)


def make(
    binary: Path,
    words: str = "",
    *,
    ready_timeout: float = 300.0,
    stall_timeout: float | None = None,
) -> TritonServer:
    folder = binary.parent
    launch = Launch({"FAKE_TRITON": words}, (), ready_timeout, stall_timeout)
    return TritonServer(binary, folder / "models", log=folder / "log", launch=launch)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and is_alive(psutil.Process(pid))


def traces(server: TritonServer) -> set[str]:
    """What there is of one server, by the names that it gives; other tests' servers run meanwhile."""
    shared = Path("/dev/shm").glob(f"{server._shared_memory_prefix}*")
    return {str(p) for p in (*shared, *Path(tempfile.gettempdir()).glob("vllm_env_server_*"))}


def test_serves_on_loopback_and_leaves_nothing(binary: Path) -> None:
    """All three frontends are bound to 127.0.0.1; process, shared memory and temporary files are gone afterwards."""
    with make(binary) as server:
        pid = server.pid
        assert alive(pid)
        assert len(traces(server)) == 2
    options = (binary.parent / "log").read_text()
    for frontend in ("http", "grpc", "metrics"):
        assert f'"{frontend}-address": "127.0.0.1"' in options
        assert f'"{frontend}-port": "{getattr(server.ports, frontend)}"' in options
    assert not alive(pid)
    assert server.leftovers == ()
    assert traces(server) == set()


def test_failed_load_is_reported_at_once_with_its_reason_in_the_last_line(binary: Path) -> None:
    """There is no timeout to wait for; of Triton's lines only the reason is left, and it is the last line."""
    server = make(binary, "broken", ready_timeout=math.inf)
    with pytest.raises(CommandError, match="ended with status 1") as failed, server:
        pass
    assert failed.value.lines() == [
        f"error: tritonserver ended with status 1 before its models were ready. The whole log is {server.log}.",
        '  why: model.json: "model" is missing',
    ]
    assert traces(server) == set()


def test_a_stub_that_cannot_start_ends_the_wait(binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tritonserver waits for its first message for ever; what it extracted for the stub is gone, too."""
    extracted = Path("/tmp", f"python_env_{uuid.uuid4().hex[:6]}")
    monkeypatch.setenv("FAKE_EXTRACTED", extracted.name)  # the whole path would be a trace of its process
    # other tests' servers run, and extract environments of theirs
    monkeypatch.setattr("vllm_env.serve.leftovers._servers", list)
    monkeypatch.setattr(module, "_EXTRACTED", re.compile(extracted.name))
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.2)
    server = make(binary, "stubless", ready_timeout=math.inf)
    try:
        with pytest.raises(CommandError, match="stub ended at its start") as failed, server:
            pass
        assert not extracted.exists()
    finally:
        shutil.rmtree(extracted, ignore_errors=True)
    assert "libx.so" in failed.value.tail
    assert not server.running


def test_a_load_that_the_server_gave_up_may_be_tried_again(binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 24.10 does so if the machine pauses for a second; another start may succeed, and not always the first one."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.2)
    with pytest.raises(StuckStartError, match="stub ended at its start"), make(binary, "abandoned", ready_timeout=math.inf):
        pass
    assert (binary.parent / "log").read_text().count("the server has given this load up") == 4


class Clock:
    """In place of the module `time`: a pause takes no time but on this clock."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_timeout_ends_the_server(binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is never ready is stopped, and the user saw how long it took."""
    monkeypatch.setattr(module, "time", Clock())
    console = Listener()
    server = make(binary, "never", ready_timeout=3.2)
    with pytest.raises(CommandError, match="not ready after 3 s"), reporting_to(console), server:
        pass
    assert list(dict.fromkeys(console.heard)) == [f"tritonserver loads, {second} s" for second in range(4)]
    assert not server.running
    assert server.members() == []


def test_interrupt_while_loading_ends_the_server(binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the wait: the server and its child are gone before KeyboardInterrupt reaches the caller."""
    monkeypatch.setattr(module, "_LEAVE_SECONDS", 0.1)
    children: list[psutil.Process] = []

    class Impatient(Console):
        def step(self, text: str, fraction: float | None = None) -> None:
            children[:] = server.members()
            if len(children) == 2:
                raise KeyboardInterrupt

    server = make(binary, "child never")
    with pytest.raises(KeyboardInterrupt), reporting_to(Impatient(quiet=True)), server:
        pass
    assert len(children) == 2
    assert not any(is_alive(process) for process in children)


def test_a_check_that_fails_ends_a_server_that_loads_meanwhile(binary: Path) -> None:
    """At once, with its child: nobody waits for a model that will not be published."""
    server = make(binary, "child never")
    loads = threading.Event()
    children: list[psutil.Process] = []

    class Watching(Console):
        def step(self, text: str, fraction: float | None = None) -> None:
            children[:] = server.members()
            if len(children) == 2:
                loads.set()

    def check() -> None:
        assert loads.wait(LIMIT)
        raise VllmEnvError("It is broken.")

    with pytest.raises(VllmEnvError, match=r"It is broken\."), reporting_to(Watching(quiet=True)):
        together(check, server.__enter__)
    assert not any(is_alive(process) for process in children)
    assert traces(server) == set()


class Stranger(fake_tritonserver.Ready):
    """Another tritonserver, which has the port; what clients ask it is noted."""

    name = "triton"
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:  # noqa: N802 - as http.server calls it
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stranger() -> Iterator[int]:
    """The port of another server on 127.0.0.1, which is ready."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        Stranger.asked.clear()
        threading.Thread(target=server.serve_forever).start()
        yield server.server_port
        server.shutdown()


def test_another_server_on_the_http_port_is_not_taken_for_this_one(binary: Path, stranger: int) -> None:
    """It took the port while the model was loaded, a minute after it had been free. The second start has other ports."""
    server = make(binary)
    server.ports = dataclasses.replace(server.ports, http=stranger)
    with server:
        assert server.ports.http != stranger
        assert identity.http_name(server.ports.http) == server.name
    assert Stranger.asked == ["/v2"]


def test_a_port_that_stays_taken_is_named(binary: Path, stranger: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the port, and nothing is left running."""
    ports = dataclasses.replace(free_ports(), http=stranger)
    monkeypatch.setattr(module, "free_ports", lambda: ports)
    server = make(binary, "never")
    with pytest.raises(StuckStartError, match=f"Another server answers on port {stranger}"), server:
        pass
    assert not server.running


def test_another_server_on_the_grpc_port_is_not_taken_for_this_one(binary: Path) -> None:
    """Both frontends tell the name of the server."""
    server = make(binary, "stranger")
    with pytest.raises(StuckStartError) as failed, server:
        pass
    assert failed.value.what.startswith(f"Another server answers on port {server.ports.grpc}")


def test_a_port_that_tritonserver_finds_taken_costs_a_second_start(binary: Path) -> None:
    """Its own message ends the first one."""
    with make(binary, "taken-once") as server:
        assert server.running


STRANGE = ["with space", "d\N{LATIN SMALL LETTER E WITH ACUTE}j", "a;b", "it's"]
"""Names that the Python backend puts into a line of bash without quotes, or that its stub cannot decode."""


@pytest.mark.parametrize("name", STRANGE)
def test_a_repository_that_triton_mistakes_is_served_by_a_link(binary: Path, name: str) -> None:
    """The link leads to it, and is gone afterwards."""
    repository = binary.parent / name / "models"
    repository.mkdir(parents=True)
    with TritonServer(binary, repository, log=binary.parent / "log") as server:
        options = json.loads((binary.parent / "log").read_text().splitlines()[0])
        link = Path(options["model-repository"])
        assert is_plain(link)
        assert link.samefile(repository)
    assert not link.exists()
    assert repository.is_dir()
    assert traces(server) == set()


def test_known_crash_at_start_up_is_tried_once_more(binary: Path) -> None:
    """The Python backend's own fault costs a second start and not the build; the second one serves."""
    with make(binary, "crash-once") as server:
        assert server.running
    assert (binary.parent / "log").read_text().count("lock_exception") == 1


def test_known_crash_is_not_tried_for_ever(binary: Path) -> None:
    """Twice the same crash is an error, with the line that names it."""
    with pytest.raises(StuckStartError) as failed, make(binary, "crash"):
        pass
    assert "lock_exception" in failed.value.tail
    assert (binary.parent / "log").read_text().count("lock_exception") == 2


def test_start_without_a_sign_of_life_is_tried_once_more(binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs and says nothing is not waited for until the timeout."""
    starts: list[str] = []
    monkeypatch.setattr(module, "start", lambda command, **options: starts.append(command[0]) or start(command, **options))
    with pytest.raises(StuckStartError, match="said nothing"), make(binary, "never", ready_timeout=math.inf, stall_timeout=0.5):
        pass
    assert starts == [str(binary)] * 2
