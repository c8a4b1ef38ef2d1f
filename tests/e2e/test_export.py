"""The built model as an image: mounted next to the stock server in a container that may write almost nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support import containers
from support.namespaces import with_mounts
from support.parts_fixtures import ANSWER, PROMPT
from support.patience import wait_for
from support.repositories import BUILD_SECONDS, CHECKOUT
from support.serving import CPU_ARGUMENTS, READY_SECONDS, variables_for
from support.starts import TRITON, note_start
from support.triton_client import generate, get
from vllm_env.serve.server_log import telling_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from support.serving import Parts

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3 * BUILD_SECONDS)]

# As a pod with a read-only root runs it: no user of the image, no rights, no home, nothing to write to but memory.
_RESTRICTED = (
    "--read-only", "--user", "1000:1000", "--cap-drop", "all", "--security-opt", "no-new-privileges",
    "--tmpfs", "/tmp:exec,mode=1777", "--network", "host", "--shm-size", "1g",
)  # fmt: skip
_LARGEST_SCRATCH_KB = 1000


@dataclass(frozen=True)
class Pushed:
    """An exported model: its folder, what the command printed, and its name in the engine's storage."""

    folder: Path
    facts: dict[str, Any]
    name: str


@pytest.fixture(scope="module")
def pushed(parts: Parts, session_folder: Path) -> Iterator[Pushed]:
    """The real model with the stand-in in its folder, exported, pushed to a registry and pulled by its digest."""
    containers.require_podman()
    model = Path(shutil.copytree(parts.model, session_folder / "models/vllm"))
    shutil.copytree(parts.standin, model / "standin", dirs_exist_ok=True)
    (model / "vllm_engine_args.json").write_text(json.dumps({"model": "standin", **CPU_ARGUMENTS}))
    folder = session_folder / "image"
    argv = [sys.executable, "-m", "vllm_env", "export", "--oci", str(folder), "--json", "--model-repository", str(model.parent)]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT / "env")}
    facts = json.loads(subprocess.check_output(argv, env=environment))
    with containers.registry(session_folder) as address:
        push = f"{facts['push'][0]} --dest-tls-verify=false"
        subprocess.run(["sh", "-ec", push], env={**os.environ, "REGISTRY": address}, check=True)
        name = f"{address}/vllm@{facts['digest']}"
        containers._podman("pull", "--quiet", "--tls-verify=false", name, check=True)
    try:
        yield Pushed(folder, facts, name)
    finally:
        containers._podman("rmi", "--force", name)


def test_a_mounted_image_serves_and_nothing_is_unpacked(pushed: Pushed, tmp_path: Path) -> None:
    """The right answer, from a container that writes a few files to /tmp."""
    ports = containers.host_ports()
    variables = [f"--env={name}={value}" for name, value in variables_for(CPU_ARGUMENTS).items()]
    mount = ["--mount", f"type=image,source={pushed.name},destination=/mnt/image"]
    addresses = [f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")]
    listening = [f"--{kind}-port={ports[port]}" for kind, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002))]
    server = ["tritonserver", "--model-repository=/mnt/image/models", *addresses, *listening]
    log = tmp_path / "server.log"
    note_start(TRITON, CPU_ARGUMENTS)
    with containers.running([*_RESTRICTED, *variables, *mount, containers.image(), *server], log) as running:
        url = f"http://127.0.0.1:{ports[8000]}"

        def is_ready() -> bool:
            assert running.poll() is None, telling_lines(log)
            try:
                return get(url, "/v2/models/vllm/ready")[0] == 200
            except OSError:
                return False

        wait_for(is_ready, lambda: f"the model: {telling_lines(log)}", limit=READY_SECONDS, longest_pause=0.5)
        status, document = generate(url, PROMPT)
        assert (status, document["text_output"]) == (200, ANSWER)
        (name,) = set(re.findall(r"vllm-env-test-\w+", str(running.args)))
        scratch = containers._podman("exec", name, "du", "-sk", "/tmp", check=True).stdout
        assert int(scratch.split()[0]) < _LARGEST_SCRATCH_KB


def test_verify_passes_on_the_mounted_folder_and_finds_one_changed_byte(pushed: Pushed, tmp_path: Path) -> None:
    """Nobody can write there; a file with another byte is mounted over one of the image's."""
    mounted = containers._podman("image", "mount", pushed.name, check=True).stdout.strip()
    try:
        models = Path(mounted) / "models"
        done = _verify(models)
        assert done.returncode == 0, done.stderr
        (file,) = models.glob("vllm/vllm_env/lib/python3.1?/site-packages/vllm/__init__.py")
        changed = tmp_path / "changed"
        changed.write_bytes(b"X" + file.read_bytes()[1:])
        done = _verify(models, before=with_mounts((changed, file)))
        assert done.returncode == 1
        assert f"error: {file} is changed." in done.stderr
    finally:
        containers._podman("image", "unmount", pushed.name)


def _verify(models: Path, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    argv = [*before, sys.executable, "-m", "vllm_env", "verify", "--model-repository", str(models)]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT / "env")}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


def test_each_layer_streams_as_kserve_reads_it(pushed: Pushed, tmp_path: Path) -> None:
    """By Python's tarfile, with the filter that refuses what leads out of the folder."""
    for layer in pushed.facts["layers"]:
        blob = pushed.folder / "blobs" / layer["digest"].replace(":", "/")
        with blob.open("rb") as file, tarfile.open(fileobj=file, mode="r|gz") as tar:
            for member in tar:
                assert tarfile.data_filter(member, str(tmp_path))


def test_the_dockerfile_makes_one_image_of_both(pushed: Pushed, tmp_path: Path) -> None:
    """For clusters that cannot mount an image; here the base is the image that stands for NVIDIA's."""
    text = (pushed.folder / "Dockerfile").read_text()
    official = text.splitlines()[2].removeprefix("FROM ")
    assert official.startswith("nvcr.io/nvidia/tritonserver:")
    (tmp_path / "Dockerfile").write_text(text.replace(official, containers.image()))
    name = f"localhost/{tmp_path.name.replace('_', '-')}"
    build = ["build", "--quiet", "--pull=never", "--build-arg", f"MODEL={pushed.name}", "--tag", name, str(tmp_path)]
    containers._podman(*build, check=True)
    try:
        config = json.loads(containers._podman("image", "inspect", name, check=True).stdout)[0]["Config"]
        assert config["Cmd"] == ["tritonserver", "--model-repository=/models"]
        done = containers.run_in(name, "/models/vllm/vllm_env/bin/python", "-c", "import vllm; print(vllm.__file__)")
        assert done.stdout.startswith("/models/vllm/vllm_env/lib/python3"), done.stderr
    finally:
        containers._podman("rmi", "--force", name)
