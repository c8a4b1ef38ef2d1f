"""Environments that the packager has built, and servers of them; with `--slow` they have the real vLLM."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import engineless, small_build
from support.once import once
from support.repositories import BUILD_SECONDS, CHECKOUT, triton_options
from support.serving import CPU_ARGUMENTS, READY_SECONDS, STALL_SECONDS, variables_for
from support.starts import TRITON, note_start
from support.triton_client import generate
from vllm_env.serve.server import Launch, TritonServer
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from support.serving import Parts
    from support.small_fixtures import Channel

UNPACKING, WAITING, FOUND = "processes into", "waiting for it", "the environment is unpacked in"
LIBRARY = "loop.cpython-311-x86_64-linux-gnu.so"  # of uvloop; what NumPy has is also in the file that Triton extracts
PROMPT = {"text_input": FACTS[2][0], "parameters": {"temperature": 0, "max_tokens": 16}}
ANSWER = "".join(FACTS[2])


@dataclass(frozen=True)
class Packager:
    """The command line that builds environments: ``options`` say what they contain."""

    environment: Mapping[str, str]
    options: tuple[str, ...] = ()

    def run(self, *arguments: str, layout: str = "parts", **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command that builds to its end; it must succeed."""
        given = (*arguments, *self.options)
        chosen = any(option.startswith("--triton-") for option in given)
        triton = () if chosen else triton_options()
        return self.plain(*given, *triton, "--profile", "cpu", "--layout", layout, **variables)

    def plain(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command with these arguments only; it must succeed."""
        argv = [sys.executable, "-m", "vllm_env", *arguments]
        environment = {**self.environment, **variables}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS)
        assert done.returncode == 0, done.stderr
        return done


@pytest.fixture(scope="session")
def packager(request: pytest.FixtureRequest, channel: Channel, session_folder: Path) -> Packager:
    """Packs the vLLM without an engine; with `--slow` the one that everybody gets, whose environment is then in the cache."""
    if request.config.getoption("--slow"):
        request.getfixturevalue("built_repository")
        return Packager({**os.environ, "PYTHONPATH": str(CHECKOUT / "env")})

    wheel = once("parts/wheel", engineless.make_wheel)
    spec = small_build.make_spec(session_folder / "parts", wheel)  # a worker's own: a build writes the lock next to it
    return Packager(small_build.environment(channel.root), ("--spec", str(spec)))


@pytest.fixture(scope="session")
def parts_repository(packager: Packager) -> Path:
    """A model repository in parts; read it, do not change it."""

    def make(models: Path) -> Path:
        packager.run("--no-smoke-run", "--model-repository", str(models))
        return models

    return once("parts/models", make)


@pytest.fixture
def in_parts(light_parts: Parts, parts_repository: Path) -> Parts:
    """What servers are made of, with the environment in parts."""
    return dataclasses.replace(light_parts, model=parts_repository / "vllm")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where this test's servers unpack: nothing is there, and nothing in a home."""
    return tmp_path / "unpacked"


@pytest.fixture
def others() -> Iterator[Path]:
    """A folder that another user can reach; pytest's own is closed to others."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root becomes another user")
    with tempfile.TemporaryDirectory(prefix="vllm_env_test_") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def unpacking_in(place: Path) -> dict[str, str]:
    """Variables for a server: also the places that are looked at after the first are this test's own."""
    (place.parent / "home").mkdir(exist_ok=True)
    return {"VLLM_ENV_UNPACKED": str(place), "XDG_CACHE_HOME": str(place.parent / "cache"), "HOME": str(place.parent / "home")}


def trees_in(place: Path) -> list[Path]:
    """Return the folders in a place, whole and unfinished ones."""
    return [path for path in place.iterdir() if path.is_dir()]


def with_standin(model: Path, parts: Parts) -> Path:
    """Have a model's own file name the stand-in, as a user names a model; return the model's folder."""
    (model / "vllm_engine_args.json").write_text(json.dumps({"model": str(parts.standin), **CPU_ARGUMENTS}))
    return model


def copy_into(models: Path, parts: Parts) -> Path:
    """Copy a model as it was built into a repository, and return its folder."""
    return with_standin(shutil.copytree(parts.model, models / "vllm"), parts)


def server_of(parts: Parts, models: Path, variables: Mapping[str, str], log: Path, *arguments: str) -> TritonServer:
    """Return a server of a repository as it is, with further arguments of tritonserver; it is not started yet."""
    note_start(TRITON, engine=parts.engine)
    launch = Launch({**variables_for(CPU_ARGUMENTS), **variables}, arguments, READY_SECONDS, STALL_SECONDS)
    return TritonServer(parts.binary, models, log=log, launch=launch)


def answer(server: TritonServer, model: str = "vllm") -> str:
    """Return the answer to ``PROMPT``."""
    status, document = generate(server.http_url, PROMPT, model=model)
    assert status == 200
    return str(document["text_output"])


def lines(server: TritonServer, text: str) -> int:
    """Return how often a server's log has a text."""
    return server.log.read_text(errors="replace").count(text)
