"""README's Docker lines as they are written, in a real container on an ordinary registry: no wheel folder, no compiler."""

from __future__ import annotations

import functools
import http.server
import subprocess
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from support import containers
from support.repositories import BUILD_SECONDS, CHECKOUT
from vllm_env.base.network import Network
from vllm_env.base.pip_config import read_pip_config
from vllm_env.lock.pylock import read_pylock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3 * BUILD_SECONDS)]

_READY_SECONDS = 600
_OTHER = "12345:12345"  # a user whom neither this machine nor the image knows
_BUILD = r"-w /work nvcr\S+ \./gen_vllm_env\.sh$"
_SERVE = r"tritonserver --model-store="
_CACHED = r"VLLM_ENV_CACHE=/cache.*\./gen_vllm_env\.sh$"


@pytest.fixture(scope="module")
def folder(session_folder: Path) -> Path:
    """Where the clones are."""
    containers.require_podman()
    (session_folder / "containers").mkdir()
    return session_folder / "containers"


@pytest.fixture(scope="module")
def torch_index(folder: Path) -> Iterator[str]:
    """An index on 127.0.0.1 with the locked build of torch and nothing else, in place of the PyTorch project's."""
    wheels = read_pylock(CHECKOUT / "env" / "pylock.vllm_env-cpu.toml").wheels
    (torch,) = (wheel for wheel in wheels if wheel.index)
    (folder / "index" / torch.name).mkdir(parents=True)
    (folder / "torch.txt").write_text(f"{torch.requirement}\n")
    options = ["--no-deps", "--require-hashes", "--python-version", "3.11", "--only-binary", ":all:"]
    places = ["--dest", folder / "index" / torch.name, "--requirement", folder / "torch.txt"]
    Network(read_pip_config()).pip_command(["download", *options, *places], "fetch torch", torch_backend="cpu")
    handler = functools.partial(_Quiet, directory=str(folder / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"VLLM_ENV_TORCH_INDEX=http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@dataclass(frozen=True)
class Built:
    """A clone in which README's first line was run, and how that ended."""

    clone: Path
    done: subprocess.CompletedProcess[str]


def _clone(place: Path) -> Path:
    subprocess.run(["git", "clone", "--quiet", CHECKOUT, place], check=True)
    return place


def _line(pattern: str, clone: Path, home: Path, *options: str) -> list[str]:
    """README's line for a clone as its current folder; options come before those of the line."""
    return [*options, *containers.as_podman(containers.readme_line(pattern), {"PWD": str(clone), "HOME": str(home)})]


@pytest.fixture(scope="module")
def built(folder: Path, torch_index: str) -> Built:
    """README's first line in a fresh clone; the network is the host's because the index is on its 127.0.0.1."""
    clone = _clone(folder / "clone")
    done = containers.run_line(_line(_BUILD, clone, folder, "--network", "host", "--env", torch_index))
    return Built(clone, done)


def test_the_first_line_builds_serves_and_asks(built: Built) -> None:
    """On an ordinary registry, in an image without libnuma, git, cmake and compiler: the answers and PASS."""
    assert built.done.returncode == 0, built.done.stderr
    assert "PASS: vLLM example" in built.done.stdout.splitlines()
    assert (built.clone / "model_repository/vllm/vllm_env.tar.gz").is_file()
