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

from support.once import once
from support.repositories import run_build
from support.serving import serve
from support.triton_client import generate

if TYPE_CHECKING:
    from support.serving import Parts
    from vllm_env.serve.server import TritonServer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif("VLLM_ENV_TEST_ENVIRONMENT" in os.environ, reason="serves an environment that was not built"),
]
UNPACKING, WAITING, FOUND = "processes into", "waiting for it", "the environment is unpacked in"
GIVEN_UP = "the server has given this load up"  # after a pause of the machine, also while it unpacks
STARTING = "[vllm] importing vLLM"  # once, but for a start that gets stuck by a fault of the Python backend and is tried again
PROMPT = {"text_input": "The capital of France is", "parameters": {"temperature": 0, "max_tokens": 16}}


@pytest.fixture(scope="module")
def repository(built_repository: Path) -> Path:
    """A model repository that the real gen_vllm_env.sh built in parts, from the environment of the other tests' build."""

    def build(folder: Path) -> Path:
        done = run_build("--layout", "parts", "--no-smoke-run", "--model-repository", str(folder))
        assert done.returncode == 0, done.stderr
        return folder

    return once("parts_repository", build)


@pytest.fixture
def in_parts(parts: Parts, repository: Path) -> Parts:
    """What servers are made of, with the environment in parts."""
    return dataclasses.replace(parts, model=repository / "vllm")


def answer(server: TritonServer) -> str:
    status, document = generate(server.http_url, PROMPT)
    assert status == 200
    return str(document["text_output"])


def lines(server: TritonServer, text: str) -> int:
    return server.log.read_text(errors="replace").count(text)


def loaded(server: TritonServer, name: str) -> set[str]:
    maps = (Path(f"/proc/{process.pid}/maps").read_text() for process in server.members())
    return {line.split()[-1] for text in maps for line in text.splitlines() if line.endswith(name)}


@dataclass(frozen=True)
class Started:
    """What one of several servers did: its answer, how often its log has a text, and what its processes run and have loaded."""

    answer: str
    told: dict[str, int]
    libraries: set[str]
    programs: set[str]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where this test's servers unpack: nothing is there, and nothing in a home."""
    return tmp_path / "unpacked"


def unpacking_in(place: Path) -> dict[str, str]:
    """Variables for a server: also the places that are looked at after the first are this test's own."""
    (place.parent / "home").mkdir(exist_ok=True)
    return {"VLLM_ENV_UNPACKED": str(place), "XDG_CACHE_HOME": str(place.parent / "cache"), "HOME": str(place.parent / "home")}


def test_two_servers_that_start_at_once_share_one_unpacking(in_parts: Parts, place: Path, no_leftovers: None) -> None:
    """One of them unpacks, no stub but its model's; both answer from the unpacked environment, children too."""
    both = threading.Barrier(2)

    def start(_: int) -> Started:
        with serve(in_parts, as_built=True, environment=unpacking_in(place)) as server:
            said = answer(server)
            told = {text: lines(server, text) for text in (UNPACKING, WAITING, FOUND, STARTING, GIVEN_UP)}
            programs = {str(Path(f"/proc/{process.pid}/exe").readlink()) for process in server.members()}
            found = Started(said, told, loaded(server, "/libtorch_cpu.so"), programs)
            both.wait(600)
            return found

    with ThreadPoolExecutor(2) as pool:
        started = list(pool.map(start, range(2)))
    (tree,) = (p for p in place.iterdir() if p.is_dir())
    for one in started:
        assert one.answer == "The capital of France is Paris, on the river Seine."
        assert one.told[UNPACKING] + one.told[WAITING] + one.told[FOUND] >= one.told[STARTING]
        assert one.libraries == {str(tree / "lib/python3.11/site-packages/torch/lib/libtorch_cpu.so")}
        assert str(tree / "bin/python3.11") in one.programs
    given_up = sum(one.told[GIVEN_UP] for one in started)
    assert 1 <= sum(one.told[UNPACKING] for one in started) <= 1 + given_up


def test_a_model_that_imports_vllm_itself_finds_it_and_the_next_start_unpacks_nothing(
    in_parts: Parts, place: Path, no_leftovers: None
) -> None:
    """A user's own model.py knows nothing of parts: its import has them unpacked, and nothing changes in them later."""

    def own(model: Path) -> None:
        code = model / "1/triton_vllm/loading/parts.py"
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
    shutil.copytree(repository, copy, copy_function=os.link, symlinks=True)
    part = copy / "vllm" / shown["parts"][1]["name"]
    part.unlink()
    shutil.copy2(repository / "vllm" / part.relative_to(copy / "vllm"), part)
    with part.open("r+b") as stream:
        stream.seek(1000)
        byte = stream.read(1)
        stream.seek(1000)
        stream.write(bytes([byte[0] ^ 1]))
    done = run_build("verify", "--model-repository", str(copy))
    assert done.returncode == 1
    assert shown["parts"][1]["name"] in done.stderr
