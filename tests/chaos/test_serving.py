"""Parts of a server die: what the client sees, how long until it is served again, and that nothing is left.

`VLLM_ENV_TEST_CHAOS_TABLE=FILE tests/run.sh tests/chaos/test_serving.py --slow` writes benchmarks/results/chaos_two_cores.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil
import pytest

from support import models
from support.chaos_table import ChaosTable
from support.clock import now
from support.kill import kill_at_rest
from support.leftovers import leftovers, wait_for_none
from support.machines import Machines
from support.model_control import load, unload
from support.model_requests import prompt
from support.open_stream import OpenStream
from support.parts_fixtures import copy_into, server_of, trees_in
from support.patience import pause, wait_for
from support.reference import ONE_THREAD
from support.server_processes import engines, stubs
from support.serving import EXPLICIT, behind, fill, in_small_place, serve
from support.settings import with_parameter
from support.triton_client import generate
from vllm_env.serve.processes import is_alive
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.serving import Parts, Serve
    from vllm_env.serve.server import TritonServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.xdist_group("chaos")]
PROMPT, _ = FACTS[2]
LONG = {"temperature": 0, "max_tokens": 60_000, "ignore_eos": True}
STREAMED = {"text_input": PROMPT, "stream": True, **LONG}
SEATS = 2
ROOM_BYTES = 512 << 20  # for what Triton itself extracts of a model
LONG_WAIT_SECONDS = 5.0
CONTROL = (EXPLICIT, "--load-model=vllm")
BUSY_SECONDS = 300.0


@pytest.fixture(scope="module")
def table() -> Iterator[ChaosTable]:
    """The rows of this run, written if its servers have left nothing."""
    before = leftovers(os.getpid())
    made = ChaosTable()
    yield made
    wait_for_none(before)
    made.write()


@pytest.fixture(scope="module")
def engine(parts: Parts) -> dict[str, object]:
    """Engine arguments for answers of half a minute, two at a time."""
    model = models.long_standin(parts.environment)
    return {"model": str(model), "max_model_len": models.LONG_POSITIONS, "max_num_seqs": SEATS}


def prepare(model: Path) -> None:
    with_parameter(model, "ENGINE_TIMEOUT_SECONDS", "20")


@pytest.fixture(scope="module")
def server(serving: Serve, engine: dict[str, object], table: ChaosTable) -> Iterator[TritonServer]:
    """One server for all cases that it survives; it ends before the table is written."""
    with serving(engine, environment=ONE_THREAD, prepare=prepare, arguments=CONTROL) as running:
        yield running


def is_served(server: TritonServer) -> bool:
    with contextlib.suppress(OSError):
        return generate(server.http_url, {"text_input": PROMPT, "max_tokens": 1}, timeout=BUSY_SECONDS)[0] == 200
    return False


def served_again(server: TritonServer, since: float) -> float:
    """Return the seconds until a request is answered."""
    wait_for(lambda: is_served(server), "an answer", longest_pause=0.2)
    return now() - since


def streaming(server: TritonServer, stack: ExitStack, count: int = 1) -> list[OpenStream]:
    """Return requests in the middle of their answers."""
    tensors = prompt(PROMPT, LONG, stream=True)
    streams = [stack.enter_context(OpenStream(server.grpc_url, tensors, own_connection=True)) for _ in range(count)]
    for stream in streams:
        stream.wait(3)
    return streams


def wait_for_end(processes: set[psutil.Process]) -> None:
    wait_for(lambda: not any(map(is_alive, processes)), lambda: f"the end of {processes}")


def hurt(server: TritonServer, victim: psutil.Process, number: int) -> tuple[str, float]:
    """Send a signal to a process while a client reads; return what the client sees, and when the signal was sent."""
    with ExitStack() as stack:
        (stream,) = streaming(server, stack)
        since = now()
        victim.send_signal(number)
        return stream.wait_end(BUSY_SECONDS).error, since


@pytest.mark.parametrize(("case", "number"), [("EngineCore killed", signal.SIGKILL), ("EngineCore stopped", signal.SIGSTOP)])
def test_engine(server: TritonServer, table: ChaosTable, case: str, number: int) -> None:
    """The client is told at once, or after ENGINE_TIMEOUT_SECONDS (20 here); the engine comes back by itself."""
    (victim,) = engines(server)
    seen, since = hurt(server, victim, number)
    assert "unhealthy vLLM engine" in seen
    table.add(case, seen, served_again(server, since))
    wait_for_end({victim})


def test_worker(serving: Serve, engine: dict[str, object], table: ChaosTable) -> None:
    """A worker that is a process of its own, as with several GPUs: the whole engine is started again."""
    with serving({**engine, "distributed_executor_backend": "mp"}, environment=ONE_THREAD, prepare=prepare) as server:
        old = {p for p in psutil.Process(server.pid).children(recursive=True) if p.name().startswith("VLLM::")}
        (victim,) = (process for process in old if process.name().startswith("VLLM::Worker"))
        seen, since = hurt(server, victim, signal.SIGKILL)
        assert "unhealthy vLLM engine" in seen
        again = served_again(server, since)
        wait_for_end(old)
        hurt_both(server)
    table.add("a worker killed", seen, again)


def hurt_both(server: TritonServer) -> None:
    """EngineCore is killed and its worker hangs, as one that waits for another machine's GPU: neither is left."""
    (worker,) = (p for p in psutil.Process(server.pid).children(recursive=True) if p.name().startswith("VLLM::Worker"))
    (core,) = engines(server)
    with ExitStack() as stack:
        (stream,) = streaming(server, stack)
        since = now()
        worker.suspend()
        core.kill()
        assert "unhealthy vLLM engine" in stream.wait_end(BUSY_SECONDS).error
    wait_for_end({core, worker})
    served_again(server, since)


@contextlib.contextmanager
def reading(server: TritonServer) -> Iterator[None]:
    """A client in the midst of its answer, which is killed in the end."""
    command = ["curl", "-sN", f"{server.http_url}/v2/models/vllm/generate_stream", "-d", json.dumps(STREAMED)]
    client = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert client.stdout is not None
        assert client.stdout.readline().startswith(b"data:")
        yield
    finally:
        client.kill()
        client.communicate()


@contextlib.contextmanager
def not_reading(server: TritonServer) -> Iterator[None]:
    """A client that reads nothing after its first token, and leaves in the end."""
    body = json.dumps(STREAMED).encode()
    address = urlsplit(server.http_url)
    head = f"POST /v2/models/vllm/generate_stream HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((address.hostname or "", address.port or 0))
        client.sendall(head.encode() + body)
        seen = b""
        while b"data:" not in seen:
            seen += client.recv(64)
        yield


@pytest.mark.parametrize(
    ("case", "taking"),
    [
        ("all seats taken by clients that are killed", reading),
        ("all seats taken by clients that do not read, and leave", not_reading),
    ],
)
def test_every_seat(
    server: TritonServer, table: ChaosTable, case: str, taking: Callable[[TritonServer], contextlib.AbstractContextManager[None]]
) -> None:
    """With one seat left a neighbour is answered at once, without any it waits, and it has its answer when they are gone."""
    with ExitStack() as neighbours, ExitStack() as clients:
        for _ in range(SEATS - 1):
            clients.enter_context(taking(server))
        took = served_again(server, now())
        clients.enter_context(taking(server))
        request = prompt(PROMPT, {"max_tokens": 1}, stream=True)
        neighbour = neighbours.enter_context(OpenStream(server.grpc_url, request, own_connection=True))
        waits = max(LONG_WAIT_SECONDS, 10 * took)
        pause(waits)
        assert neighbour.events == []
        since = now()
        clients.close()
        end = neighbour.wait_end(BUSY_SECONDS)
    assert end.error == ""
    table.add(case, f"a neighbour waits {waits:.0f} s, until they leave", end.at - since)


def test_slow_reader(server: TritonServer, table: ChaosTable) -> None:
    """A client reads nothing of its stream; a neighbour is answered meanwhile."""
    with not_reading(server), ExitStack() as stack:
        (neighbour,) = streaming(server, stack)
        neighbour.wait(200)
    table.add("a client that does not read, and a seat is left", "its answers wait", None)


def test_unload_in_mid_stream(server: TritonServer, table: ChaosTable) -> None:
    """Triton lets the stream end, and only then unloads the model; a load serves again."""
    old = stubs(server) | engines(server)
    request = prompt(PROMPT, {**LONG, "max_tokens": 2000}, stream=True)
    with OpenStream(server.grpc_url, request, own_connection=True) as stream:
        stream.wait(3)
        assert unload(server)[0] == 200
        assert stream.wait_end(BUSY_SECONDS).error == ""
    wait_for_end(old)
    since = now()
    assert load(server)[0] == 200
    table.add("unload in mid-stream, then load", "its whole answer", served_again(server, since))


def test_stub_killed(server: TritonServer, table: ChaosTable) -> None:
    """Triton does not start it again by itself: an unload and a load do."""
    old = stubs(server) | engines(server)
    (stub,) = stubs(server)
    kill_at_rest(stub.pid)
    status, answer = generate(server.http_url, {"text_input": PROMPT}, timeout=BUSY_SECONDS)
    assert status != 200
    wait_for_end(old)
    since = now()
    unload(server)
    assert load(server)[0] == 200
    table.add("stub killed, then unload and load", answer["error"], served_again(server, since))


def test_server_killed(serving: Serve, engine: dict[str, object], table: ChaosTable) -> None:
    """All its processes end; the next server starts and finds nothing in its way."""
    with serving(engine, environment=ONE_THREAD, prepare=prepare) as server:
        old = {process for process in psutil.Process(server.pid).children(recursive=True) if is_alive(process)}
        with ExitStack() as stack:
            (stream,) = streaming(server, stack)
            since = now()
            os.kill(server.pid, signal.SIGKILL)
            seen = stream.wait_end(BUSY_SECONDS).error
        wait_for_end(old)
    ended = now() - since
    with serving(engine, environment=ONE_THREAD, prepare=prepare) as server:
        again = served_again(server, since)
    assert ended < again
    table.add("tritonserver killed, then started", seen, again)


@pytest.mark.skipif(len([*Path("/proc/driver/nvidia/gpus").glob("*")]) == 1, reason="each machine needs a GPU of its own")
def test_node_killed(parts: Parts, engine: dict[str, object], tmp_path: Path, table: ChaosTable) -> None:
    """The other of two machines that share the model; it is started again, as Kubernetes does."""
    machines = Machines(parts, tmp_path, engine)
    with ExitStack() as until_end:
        until_end.callback(machines.close)
        machines.start_node()
        server = until_end.enter_context(machines.server())
        with ExitStack() as stack:
            (stream,) = streaming(server, stack)
            since = now()
            machines.end_node(signal.SIGKILL)
            seen = stream.wait_end(BUSY_SECONDS).error
        assert "unhealthy vLLM engine" in seen
        machines.start_node()
        table.add("a node of two killed, then started", seen, served_again(server, since))


_ONE_DISK = """\
folder=$1
mount --bind "$folder" /mnt
mount -t tmpfs -o "size=$2,mode=1777" tmpfs /tmp
mkdir -p "$folder" /tmp/home
mount --bind /mnt "$folder"
unset VLLM_ENV_UNPACKED XDG_CACHE_HOME
export TMPDIR=/tmp HOME=/tmp/home
shift 2
exec "$@"
"""


@pytest.mark.skipif("VLLM_ENV_TEST_ENVIRONMENT" in os.environ, reason="serves an environment that was not built")
def test_disk_full(parts: Parts, disk_folder: Path, table: ChaosTable) -> None:
    """The disk with the home and /tmp has no room for the unpacked environment: the load says so, and the next one works."""
    models = disk_folder / "models"
    copy_into(models, parts)
    size = sum(file.lstat().st_size for file in parts.environment.rglob("*")) + 2 * ROOM_BYTES
    small = behind(parts, disk_folder, _ONE_DISK, disk_folder, size)
    with server_of(small, models, ONE_THREAD, disk_folder / "server.log", EXPLICIT) as server:
        disk = Path(f"/proc/{server.pid}/root/tmp")
        assert shutil.disk_usage(disk).total < 2 * size
        filler = disk / "filler"
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - ROOM_BYTES)
        status, told = load(server)
        assert status == 400
        _, _, reason = str(json.loads(told)["error"]).partition("Internal: ")
        seen, _, frames = reason.partition("\n")
        assert seen.startswith("ConfigError: No folder can take the unpacked environment")
        assert frames.split()[:1] == ["At:"]
        assert frames.count("): ") == 1  # Triton's own line about model.py
        places = (disk / "home/.cache/vllm_env/unpacked", *disk.glob("vllm_env_unpacked_*"))
        assert [tree for place in places for tree in trees_in(place)] == []
        wait_for(lambda: [process.pid for process in server.members()] == [server.pid], "the end of the failed load")
        since = now()
        filler.unlink()
        assert load(server)[0] == 200
        again = served_again(server, since)
        assert len([tree for place in places for tree in trees_in(place)]) == 1
    table.add("the disk full at a start, then not", seen, again)


def test_hub_lost(serving: Serve, table: ChaosTable) -> None:
    """Weights that are on this machine need no hub, neither at a start nor later."""
    lost = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": ""}
    since = now()
    with serving(environment={**ONE_THREAD, **lost}) as server:
        again = served_again(server, since)
    table.add("the hub lost at a start", "-", again)


def test_shared_memory_full(parts: Parts, tmp_path: Path, table: ChaosTable) -> None:
    """An answer that does not fit ends with an error. Short ones are served all the while."""
    small = in_small_place(parts, "/dev/shm", tmp_path, "64m")  # as a container has it
    # some MB of log probabilities, where Triton's region has 1 MB until it grows
    large = prompt(PROMPT, {"n": 8, "logprobs": 20, "max_tokens": 200, "ignore_eos": True}, return_logprobs=True)
    with serve(small, environment=ONE_THREAD) as server:
        filler = Path(f"/proc/{server.pid}/root/dev/shm/filler")
        fill(filler)
        with OpenStream(server.grpc_url, large) as stream:
            seen = stream.wait_end(BUSY_SECONDS).error
        assert "could not be sent" in seen
        assert is_served(server)
        filler.unlink()
        with OpenStream(server.grpc_url, large) as stream:
            assert stream.wait_end(BUSY_SECONDS).error == ""
    table.add("/dev/shm full", seen, None)
