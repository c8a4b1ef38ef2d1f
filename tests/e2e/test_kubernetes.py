"""The overlay ``cpu`` in a real container, with the arguments, variables, mounts, probes and times of the rendered manifest."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from run_pod import Pod, pod_of, podman_arguments, render
from support import containers
from support.clock import now
from support.event_stream import EventStream
from support.kill import kill_at_rest
from support.leftovers import name_of
from support.manifests import require_kubectl, seconds, write_own
from support.parts_fixtures import ANSWER, PROMPT
from support.patience import LIMIT, pause, wait_for
from support.repositories import BUILD_SECONDS, CHECKOUT
from support.serving import CPU_ARGUMENTS, READY_SECONDS
from support.starts import TRITON, note_start
from support.triton_client import generate, get
from vllm_env.serve.server_log import telling_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.serving import Parts

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3 * BUILD_SECONDS)]

_CLAIM = "vllm-models"
_STREAMS = 32
_LONG = {"text_input": "Hello", "stream": True, "sampling_parameters": json.dumps({"max_tokens": 240, "ignore_eos": True})}


@pytest.fixture(scope="module")
def models(parts: Parts, session_folder: Path) -> Path:
    """A repository with the real model and the stand-in in its folder."""
    models = session_folder / "kubernetes"
    # Links to what is large, and copies of what is written here.
    others = shutil.ignore_patterns("standin", "vllm_engine_args.json")
    model = Path(shutil.copytree(parts.model, models / "vllm", copy_function=os.link, ignore=others))
    shutil.copytree(parts.standin, model / "standin")
    (model / "vllm_engine_args.json").write_text(json.dumps({"model": "standin", **CPU_ARGUMENTS}))
    return models


@pytest.fixture(scope="module")
def image(models: Path, session_folder: Path) -> Iterator[str]:
    """The same, as ``export`` writes it, pushed to a registry and pulled from there."""
    containers.require_podman()
    require_kubectl()
    folder = session_folder / "oci"
    argv = [sys.executable, "-m", "vllm_env", "export", "--oci", str(folder), "--model-repository", str(models)]
    subprocess.run([*argv, "--tag", "model"], env={**os.environ, "PYTHONPATH": str(CHECKOUT / "env")}, check=True)
    with containers.registry(session_folder) as address:
        name = f"{address}/vllm:model"
        push = ["skopeo", "copy", "--quiet", "--preserve-digests", "--dest-tls-verify=false"]
        subprocess.run([*push, f"oci:{folder}:model", f"docker://{name}"], check=True)
        containers._podman("pull", "--quiet", "--tls-verify=false", name, check=True)
    for written in (folder, session_folder / "registry"):
        shutil.rmtree(written)
    yield name
    containers._podman("rmi", "--force", name)


@pytest.fixture(scope="module")
def claim(models: Path) -> Iterator[None]:
    """The claim of the component ``parts-on-a-volume``, with the repository in it."""
    containers.require_podman()
    containers._podman("volume", "create", _CLAIM, check=True)
    try:
        place = containers._podman("volume", "inspect", "--format", "{{.Mountpoint}}", _CLAIM, check=True).stdout.strip()
        shutil.copytree(models, Path(place) / "models", symlinks=True)
        yield
    finally:
        containers._podman("volume", "rm", "--force", _CLAIM)


@dataclass
class Running:
    """A pod in a container, and its probes as a kubelet sends them."""

    pod: Pod
    process: subprocess.Popen[bytes]
    ports: dict[int, int]
    log: Path
    began: float
    said: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The container's."""
        arguments: Any = self.process.args
        return str(arguments[arguments.index("--name") + 1])

    @property
    def url(self) -> str:
        """Triton's HTTP port, as the machine has it."""
        return f"http://127.0.0.1:{self.ports[8000]}"

    def passes(self, kind: str) -> bool:
        """Return whether a probe succeeds, however long it takes: the machine may be busy."""
        assert self.process.poll() is None, telling_lines(self.log)
        probe = self.pod.container[f"{kind}Probe"]
        if "exec" in probe:
            done = containers._podman("exec", self.name, *probe["exec"]["command"], seconds=LIMIT)
            self.said[kind] = done.stderr
            return done.returncode == 0
        named = {port["name"]: port["containerPort"] for port in self.pod.container["ports"]}
        port = self.ports[named[probe["httpGet"]["port"]]]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{probe['httpGet']['path']}", timeout=LIMIT):
                return True
        except OSError as error:
            self.said[kind] = str(error)
            return False

    def wait_until(self, kind: str, *, passes: bool, limit: float = READY_SECONDS) -> None:
        """Wait until a probe has this result; liveness must not fail meanwhile, unless it is what is waited for."""

        def has_it() -> bool:
            assert kind != "readiness" or self.passes("liveness"), self.said
            return self.passes(kind) is passes

        wait_for(has_it, lambda: f"{kind}: {self.said} {telling_lines(self.log)}", limit=limit, longest_pause=0.2)

    def server(self) -> psutil.Process:
        """Return the container's first process, as the machine sees it."""
        return psutil.Process(int(containers._podman("inspect", "--format", "{{.State.Pid}}", self.name, check=True).stdout))

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the container's processes with a name, which the kernel has cut."""
        return [one for one in self.server().children(recursive=True) if name_of(one).startswith(name)]


@pytest.fixture
def running(image: str, tmp_path: Path) -> Iterator[Running]:
    """The overlay with the images of this machine, started and past its startup probe."""
    with _started(image, tmp_path) as started:
        yield started


@contextlib.contextmanager
def _started(image: str, tmp_path: Path, *components: str) -> Iterator[Running]:
    own = write_own(tmp_path / "own", "overlays/cpu", *components, server=containers.image(), model=image)
    pod = pod_of(render(own))
    ports = containers.host_ports()
    log = tmp_path / "server.log"
    # The stand-in's variables are not the pod's. With the size of the KV cache in the arguments, none is needed.
    note_start(TRITON, CPU_ARGUMENTS)
    began = now()
    with _reachable() as folder, containers.running(podman_arguments(pod, folder, ports), log) as process:
        started = Running(pod, process, ports, log, began)
        wait_for(lambda: process.poll() is not None or _exists(started.name), "the container")
        started.wait_until("startup", passes=True, limit=seconds(pod.container["startupProbe"]))
        yield started


@contextlib.contextmanager
def _reachable() -> Iterator[Path]:
    """A folder that the container's user can reach; pytest's own is closed to others."""
    with tempfile.TemporaryDirectory(prefix="vllm_env_test_") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def _exists(name: str) -> bool:
    return containers._podman("container", "exists", name).returncode == 0


def test_the_probes_know_an_engine_that_restarts_from_a_dead_stub(running: Running) -> None:
    """Without its engine the pod is not ready, and stays alive; without its stub it is neither."""
    running.wait_until("readiness", passes=True)
    assert generate(running.url, PROMPT)[1]["text_output"] == ANSWER

    (engine,) = running.processes("VLLM::EngineCor")
    engine.send_signal(signal.SIGKILL)
    running.wait_until("readiness", passes=False)
    assert get(running.url, "/v2/health/ready")[0] == 200  # why Triton 24.10 is not asked
    running.wait_until("readiness", passes=True)
    assert generate(running.url, PROMPT)[1]["text_output"] == ANSWER

    (stub,) = running.processes("triton_python_b")
    kill_at_rest(stub.pid)
    running.wait_until("liveness", passes=False)
    # As often as a kubelet asks before it starts the container again.
    times = running.pod.container["livenessProbe"]["failureThreshold"]
    assert [running.passes("liveness") for _ in range(times)] == [False] * times
    assert "a stub is dead" in running.said["liveness"]
    assert not running.passes("readiness")


def test_a_pod_that_ends_answers_all(running: Running) -> None:
    """During preStop it takes new requests, then it finishes those in flight; all within the grace period, with status 0."""
    container = running.pod.container
    answers: list[tuple[int, Any]] = []
    going = threading.Event()

    def load() -> None:
        while not going.is_set():
            answers.append(generate(running.url, PROMPT))

    clients = [threading.Thread(target=load) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        wait_for(lambda: len(answers) >= len(clients), "the first answers")
        began = now()
        before = len(answers)
        pause(container["lifecycle"]["preStop"]["sleep"]["seconds"])
    finally:
        going.set()  # every proxy has learnt that the pod is going
        for client in clients:
            client.join()
    assert len(answers) > before
    assert [status for status, _ in answers] == [200] * len(answers)

    server = running.server()
    with contextlib.ExitStack() as stack:
        path = "/v2/models/vllm/generate_stream"
        streams = [stack.enter_context(EventStream(running.url, path, _LONG)) for _ in range(_STREAMS)]
        for stream in streams:
            stream.wait(1)
        server.send_signal(signal.SIGTERM)  # at once; `podman kill` takes longer than the streams
        ends = [stream.wait_end() for stream in streams]
    assert [stream.status for stream in streams] == [200] * _STREAMS
    assert [event for events in ends for event in events if "error" in event] == []
    assert running.process.wait(LIMIT) == 0, telling_lines(running.log)
    assert now() - began <= running.pod.spec["terminationGracePeriodSeconds"]


def test_the_root_cannot_be_written(running: Running) -> None:
    """By a user who is not root; its caches are in its home."""
    script = 'id -u; touch /here 2>&1; echo > "$HOME/there" && echo "$HOME"'
    done = containers._podman("exec", running.name, "sh", "-c", script)
    assert done.stdout.splitlines() == ["1000", "touch: cannot touch '/here': Read-only file system", "/cache"]


@pytest.mark.usefixtures("claim")
def test_starts_from_an_image_and_from_a_volume(image: str, tmp_path: Path) -> None:
    """In turns, three times: nothing of the image is unpacked, and the pod's cache has the environment of a volume's parts."""
    ways = {"image": (), "parts on a volume": ("parts-on-a-volume",)}
    for number in range(3):
        for way, components in ways.items():
            folder = tmp_path / f"{way} {number}"
            folder.mkdir()
            with _started(image, folder, *components) as running:
                print(f"{way}: ready after {now() - running.began:.1f} s")
                assert generate(running.url, PROMPT)[1]["text_output"] == ANSWER
                found = containers._podman("exec", running.name, "find", "/cache", "/tmp", "-name", "libtorch_cpu.so")
                assert bool(found.stdout) is bool(components), way
