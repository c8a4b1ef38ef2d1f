"""The wheel of the packager, as someone installs it who has no checkout."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from support.leftovers import leftovers, wait_for_none
from support.patience import wait_for
from support.repositories import CHECKOUT
from support.serving import READY_SECONDS
from support.triton_client import is_ready
from vllm_env.serve.server import free_ports

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,  # it installs, downloads a Triton and builds
    pytest.mark.skipif("VLLM_ENV_TEST_ENVIRONMENT" in os.environ, reason="serves an environment that was not built"),
]


def test_an_installed_wheel_builds_serves_and_asks(disk_folder: Path) -> None:
    """In a fresh virtual environment, with an empty home, in an empty folder: the build, then the two commands it names.

    Only uv's cache of wheels is that of the other tests.
    """
    before = leftovers(os.getpid())
    home, place, venv = disk_folder / "home", disk_folder / "work", disk_folder / "venv"
    home.mkdir()
    place.mkdir()
    uv = Path(sys.executable).parent / "uv"
    caches = {"UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache/uv")}
    subprocess.run([uv, "build", "-q", "--wheel", "--out-dir", disk_folder, CHECKOUT], check=True)
    (wheel,) = disk_folder.glob("vllm_env-*.whl")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, venv], check=True)
    subprocess.run([uv, "pip", "install", "-q", "--python", venv / "bin/python", wheel], check=True)
    names = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON", "XDG_", "HF_"))}
    path = f"{venv}/bin:{names['PATH']}"
    env = {**names, **caches, "HOME": str(home), "PATH": path, "VLLM_ENV_UNPACKED": str(disk_folder / "unpacked")}
    env |= {"HF_ENDPOINT": "http://127.0.0.1:9"}  # no hub: the stand-in is served

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=place, env=env, capture_output=True, text=True, check=False)

    # 1) Build
    built = typed("vllm-env", "--profile", "cpu")
    assert built.returncode == 0, built.stderr
    assert "PASS: vLLM example" in built.stdout
    *_, head, serve, ask = built.stdout.splitlines()
    assert [head, serve, ask] == ["Next:", "  vllm-env serve", "  vllm-env client --iterations 10"]
    # 2) Serve and ask
    ports = free_ports()
    own = [f"--http-port={ports.http}", f"--grpc-port={ports.grpc}", f"--metrics-port={ports.metrics}"]
    log = disk_folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen([*shlex.split(serve), "--", *own], cwd=place, env=env, stdout=output, stderr=output)
    try:
        url = f"127.0.0.1:{ports.grpc}"

        def has_ended_or_is_ready() -> bool:
            with contextlib.suppress(InferenceServerException):  # nothing listens yet
                return server.poll() is not None or is_ready(url)
            return False

        wait_for(has_ended_or_is_ready, lambda: log.read_text(errors="replace")[-4000:], limit=READY_SECONDS)
        asked = typed(*shlex.split(ask), "--url", url)
        assert asked.stdout.endswith("PASS: vLLM example\n"), (
            asked.stdout + asked.stderr + log.read_text(errors="replace")[-4000:]
        )
        assert "40 sent, 40 answered" in asked.stdout
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
    # 3) What is left is below the two folders.
    wait_for_none(before)
    assert {path.name for path in place.iterdir()} <= {".tools", ".triton", "model_repository", "results.txt"}
    shutil.rmtree(place / ".triton")
    gone = typed("vllm-env", "serve")
    assert gone.returncode == 1
    assert "There is no Triton here" in gone.stderr
