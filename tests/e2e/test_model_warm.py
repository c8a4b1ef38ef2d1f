"""A warmed model: vLLM's caches are filled once, lie beside the model, and the next start compiles nothing anew."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from support.model_requests import prompt
from support.reference import ONE_THREAD
from support.repositories import point_to_environment
from support.serving import CPU_ARGUMENTS, CPU_ENVIRONMENT, READY_SECONDS, STALL_SECONDS
from support.small_fixtures import workspace_in
from support.starts import TRITON, note_start
from support.triton_client import stream, text_of
from vllm_env.base.cache import cache_root
from vllm_env.base.errors import CommandError
from vllm_env.serve.server import Launch, TritonServer
from vllm_env.serve.smoke import copy_model, set_arguments
from vllm_env.serve.standin import FACTS
from vllm_env.serve.warm import Warmed, warm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.serving import Parts

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PROMPT, ANSWER = FACTS[2]
VARIABLES = {**CPU_ENVIRONMENT, **ONE_THREAD}
COMPILED = "*.so"  # on CPU, what PyTorch's inductor compiles with the C++ compiler


@dataclass(frozen=True)
class Run:
    """A warmed model, what the warm run returned, and the server's log."""

    model: Path
    warmed: Warmed
    log: str


def make_model(parts: Parts, folder: Path, model: Path) -> Path:
    """Copies the built model's folder, with arguments that let vLLM compile."""
    copy_model(parts.model, folder)
    set_arguments(folder, {**CPU_ARGUMENTS, "model": str(model), "enforce_eager": False})
    point_to_environment(folder, parts.environment)
    return folder


def compiled(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob(COMPILED)}


def engine_seconds(log: str) -> float:
    """What vLLM says that profiling, KV cache and warm-up took, most of it compilation."""
    found = re.search(r"init engine .* took ([\d.]+) s", log)
    assert found, log[-3000:]
    return float(found[1])


def warm_here(parts: Parts, model: Path, log: Path, **variables: str) -> Warmed:
    """Warms a model with an operator's variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**VARIABLES, **variables}.items():
            patch.setenv(name, value)
        return warm(workspace_in(cache_root()), parts.binary, model, log=log)


@pytest.fixture(scope="module")
def run(parts: Parts, session_folder: Path) -> Iterator[Run]:
    """One warm run for all tests here, with an empty user's cache."""
    folder = session_folder / "warm"
    model = make_model(parts, folder / "models" / "mine", parts.standin)
    warmed = warm_here(parts, model, folder / "server.log", XDG_CACHE_HOME=str(folder / "home"))
    yield Run(model, warmed, (folder / "server.log").read_text())
    shutil.rmtree(folder)


def test_the_caches_lie_beside_the_model(run: Run) -> None:
    """Compiled code and a record that says what it is for; nothing in the user's cache, no staging folder."""
    assert run.warmed.folder == run.model / "vllm_cache"
    assert compiled(run.warmed.folder)
    record = json.loads((run.warmed.folder / "warm.json").read_text())
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", record["vllm"])
    assert record["devices"]
    assert not list(run.model.parent.rglob(".vllm_env*"))
    assert not list((run.model.parent.parent / "home").rglob(COMPILED))


def test_the_next_start_compiles_nothing(run: Run, parts: Parts, tmp_path: Path) -> None:
    """In another place and for another user, as in a new container: answers are right, and no file is compiled anew."""
    model = tmp_path / "elsewhere" / "mine"
    shutil.copytree(run.model, model, symlinks=True)
    before = {p: p.stat().st_mtime_ns for p in (model / "vllm_cache").rglob("*")}
    home = tmp_path / "home"
    log = tmp_path / "server.log"
    variables = {**VARIABLES, "XDG_CACHE_HOME": str(home)}
    note_start(TRITON)
    with TritonServer(parts.binary, model.parent, log=log, launch=Launch(variables, (), READY_SECONDS, STALL_SECONDS)) as server:
        assert text_of(stream(server.grpc_url, [prompt(PROMPT, {"temperature": 0}, stream=True)], model="mine")) == ANSWER
    text = log.read_text()
    assert "vLLM's caches, filled on" in text
    assert "is ignored" not in text
    assert compiled(home / "vllm_env" / "warm") == compiled(run.warmed.folder)
    assert {p: p.stat().st_mtime_ns for p in (model / "vllm_cache").rglob("*")} == before
    print(f"engine: {engine_seconds(run.log):.1f} s when warmed, {engine_seconds(text):.1f} s from the caches")


@pytest.mark.usefixtures("no_leftovers")
def test_a_model_that_does_not_load_keeps_its_caches(run: Run, parts: Parts, tmp_path: Path) -> None:
    """The reason is vLLM's, and the caches of an earlier run stay as they were."""
    model = make_model(parts, tmp_path / "models" / "mine", tmp_path / "no-such-model")
    shutil.copytree(run.warmed.folder, model / "vllm_cache")
    before = {p.name: p.stat().st_mtime_ns for p in model.iterdir() if p.name != "1"}
    with pytest.raises(CommandError) as caught:
        warm_here(parts, model, tmp_path / "server.log")
    assert "no-such-model" in caught.value.cause
    assert {p.name: p.stat().st_mtime_ns for p in model.iterdir() if p.name != "1"} == before
