"""An environment in parts on the stock tritonserver: unpacked once on a machine, whole or not at all, and served from there."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import engineless, small_build
from support.mapped import libraries_of
from support.model_control import GIVEN_UP
from support.repositories import run_build
from support.serving import serve
from support.triton_client import generate

if TYPE_CHECKING:
    from support.serving import Parts
    from support.small_fixtures import Channel
    from vllm_env.serve.server import TritonServer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif("VLLM_ENV_TEST_ENVIRONMENT" in os.environ, reason="serves an environment that was not built"),
]
UNPACKING, WAITING, FOUND = "processes into", "waiting for it", "the environment is unpacked in"
LIBRARY = "loop.cpython-311-x86_64-linux-gnu.so"  # of uvloop; what NumPy has is also in the file that Triton extracts
STARTING = "[vllm] importing vLLM"  # once, but for a start that gets stuck by a fault of the Python backend and is tried again
PROMPT = {"text_input": "The capital of France is", "parameters": {"temperature": 0, "max_tokens": 16}}


@pytest.fixture(scope="module")
def repository(request: pytest.FixtureRequest, channel: Channel, session_folder: Path) -> Path:
    """A model repository in parts, with the vLLM without an engine; with `--slow` the one that everybody gets."""
    folder = session_folder / "parts"
    if request.config.getoption("--slow"):
        request.getfixturevalue("built_repository")  # whose environment is then in the cache
        done = run_build("--layout", "parts", "--no-smoke-run", "--model-repository", str(folder / "models"))
    else:
        spec = small_build.make_spec(folder / "spec", engineless.make_wheel(folder))
        done = small_build.build(channel.root, folder / "models", "--spec", spec, "--layout", "parts")
    assert done.returncode == 0, done.stderr
    return folder / "models"


@pytest.fixture
def in_parts(light_parts: Parts, repository: Path) -> Parts:
    """What servers are made of, with the environment in parts."""
    return dataclasses.replace(light_parts, model=repository / "vllm")


def answer(server: TritonServer) -> str:
    status, document = generate(server.http_url, PROMPT)
    assert status == 200
    return str(document["text_output"])


def lines(server: TritonServer, text: str) -> int:
    return server.log.read_text(errors="replace").count(text)


@dataclass(frozen=True)
class Started:
    """What one of several servers did: its answer, how often its log has a text, and what its processes have loaded."""

    answer: str
    told: dict[str, int]
    libraries: set[str]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where this test's servers unpack: nothing is there, and nothing in a home."""
    return tmp_path / "unpacked"


def unpacking_in(place: Path) -> dict[str, str]:
    """Variables for a server: also the places that are looked at after the first are this test's own."""
    (place.parent / "home").mkdir(exist_ok=True)
    return {"VLLM_ENV_UNPACKED": str(place), "XDG_CACHE_HOME": str(place.parent / "cache"), "HOME": str(place.parent / "home")}


def test_two_servers_that_start_at_once_share_one_unpacking(in_parts: Parts, place: Path, no_leftovers: None) -> None:
    """One of them unpacks, no stub but its model's; both answer from the unpacked environment."""
    both = threading.Barrier(2)

    def start(_: int) -> Started:
        with serve(in_parts, as_built=True, environment=unpacking_in(place)) as server:
            said = answer(server)
            told = {text: lines(server, text) for text in (UNPACKING, WAITING, FOUND, STARTING, GIVEN_UP)}
            found = Started(said, told, libraries_of(server, LIBRARY))
            both.wait(600)
            return found

    with ThreadPoolExecutor(2) as pool:
        started = list(pool.map(start, range(2)))
    (tree,) = (p for p in place.iterdir() if p.is_dir())
    for one in started:
        assert one.answer == "The capital of France is Paris, on the river Seine."
        assert one.told[UNPACKING] + one.told[WAITING] + one.told[FOUND] >= one.told[STARTING]
        assert one.libraries == {str(next(tree.rglob(LIBRARY)))}
    given_up = sum(one.told[GIVEN_UP] for one in started)
    assert 1 <= sum(one.told[UNPACKING] for one in started) <= 1 + given_up


def test_a_model_that_imports_vllm_itself_finds_it_and_the_next_start_unpacks_nothing(
    in_parts: Parts, place: Path, no_leftovers: None
) -> None:
    """A user's own model.py knows nothing of parts: its import has them unpacked, and nothing changes in them later."""

    def own(model: Path) -> None:
        code = model / "1/triton_vllm/startup/parts.py"
        code.write_text(re.sub(r"    if importlib.*", "    return\n", code.read_text(), flags=re.DOTALL))

    with serve(in_parts, as_built=True, environment=unpacking_in(place), prepare=own) as server:
        assert answer(server) == "The capital of France is Paris, on the river Seine."
        assert 1 <= lines(server, "vllm_env: unpacking") <= 1 + lines(server, GIVEN_UP)
    (tree,) = (p for p in place.iterdir() if p.is_dir())
    before = {path: path.lstat().st_ino for path in tree.rglob("*.so*")}

    def without_modes(model: Path) -> None:
        """As Triton copies a repository from an object store; it makes the stub executable again."""
        (model / "triton_python_backend_stub").chmod(0o644)

    with serve(in_parts, as_built=True, environment=unpacking_in(place), prepare=without_modes) as server:
        assert answer(server) == "The capital of France is Paris, on the river Seine."
        assert lines(server, UNPACKING) == 0
        assert lines(server, FOUND) >= lines(server, STARTING) >= 1
    assert before
    assert {path: path.lstat().st_ino for path in tree.rglob("*.so*")} == before


def test_verify_and_inspect_know_parts(repository: Path, tmp_path: Path) -> None:
    """Both accept what was built; a part with one wrong byte is refused by its name."""
    done = run_build("verify", "--model-repository", str(repository))
    assert done.returncode == 0, done.stderr
    shown = json.loads(run_build("inspect", "--json", "--model-repository", str(repository)).stdout)
    assert shown["layout"] == "parts"
    size = sum(part["size"] for part in shown["parts"]) + shown["archive"]["size"]
    assert size == sum(f.stat().st_size for f in (repository / "vllm").glob("vllm_env*/*.gz")) + shown["archive"]["size"]
    copy = tmp_path / "models"
    shutil.copytree(repository, copy, symlinks=True)
    part = copy / "vllm" / shown["parts"][1]["name"]
    with part.open("r+b") as stream:
        stream.seek(1000)
        byte = stream.read(1)
        stream.seek(1000)
        stream.write(bytes([byte[0] ^ 1]))
    done = run_build("verify", "--model-repository", str(copy))
    assert done.returncode == 1
    assert shown["parts"][1]["name"] in done.stderr
