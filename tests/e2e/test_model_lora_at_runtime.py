"""LoRA adapters of LORA_DIRECTORY come, change and go while the model serves."""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import pytest

from support.model_requests import ask, ask_all, prompt
from support.patience import wait_for, wait_for_line
from support.reference import ONE_THREAD
from support.settings import with_parameter
from triton_vllm.loading.lora import UNLISTED
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.models import MadeModels
    from support.serving import Serve
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
QUESTION, ANSWER = FACTS[2]
PROMPT = f"{QUESTION} {ANSWER}. " * 4 + QUESTION  # several blocks of the prefix cache
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def directory(session_folder: Path) -> Path:
    """The operator's directory, empty at first."""
    folder = session_folder / "lora_directory"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def lora_server(serving: Serve, made_models: MadeModels, directory: Path) -> Iterator[TritonServer]:
    """A server with the directory, with one adapter in `multi_lora.json`, and room for two more."""

    def prepare(model: Path) -> None:
        with_parameter(model, "LORA_DIRECTORY", str(directory))
        # as the official backend has it: from the directory on in which the server was started
        (model / "1" / "multi_lora.json").write_text(json.dumps({"fixed": "fixed"}), encoding="utf-8")
        shutil.copytree(made_models.adapters[0], model / "fixed")

    lora = {"enable_lora": "True", "max_lora_rank": 8, "max_loras": 3, "max_cpu_loras": 3}
    engine = {"model": str(made_models.llama), "enable_prefix_caching": True, "block_size": 32, **lora}
    with serving(engine, environment=ONE_THREAD, prepare=prepare) as running:
        yield running


def place(adapter: Path, target: Path) -> None:
    """Put an adapter into its place in one step, as the documentation asks for."""
    fresh = target.with_name(f".{target.name}.new")
    shutil.copytree(adapter, fresh)
    if target.exists():
        target.rename(target.with_name(f".{target.name}.old"))
        shutil.rmtree(target.with_name(f".{target.name}.old"))
    fresh.rename(target)


def named(name: str | None) -> dict[str, object]:
    """Sampling parameters with an adapter's name, or without."""
    return {**GREEDY, "lora_name": name} if name else GREEDY


def text(server: TritonServer, name: str | None) -> str:
    """Return an adapter's answer, or its error."""
    answer = ask(server, PROMPT, named(name), exclude_input_in_output=True)
    return answer.error or answer.text


def log(server: TritonServer) -> str:
    """Return what the server has logged."""
    return server.log.read_text(encoding="utf-8", errors="replace")


@contextmanager
def neighbours(server: TritonServer) -> Iterator[list[str]]:
    """Send requests for the fixed adapter all the time; yield what they are answered."""
    answers: list[str] = []
    end = threading.Event()

    def run() -> None:
        requests = [prompt(PROMPT, named("fixed"), stream=True)] * 3
        while not end.is_set():
            answers.extend(a.error or a.text for a in ask_all(server, requests))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield answers
    finally:
        end.set()
        thread.join()


def test_an_adapter_is_added_used_replaced_and_removed_under_load(
    lora_server: TritonServer, made_models: MadeModels, directory: Path
) -> None:
    """Each time by its folder alone; the answers of others, and of the prefix cache, never hold anything of the wrong one."""
    first, second = made_models.adapters
    assert text(lora_server, "sql") == "LoRA sql is not supported"
    alone, base = text(lora_server, "fixed"), text(lora_server, None)
    wait_for_line(lora_server, UNLISTED)
    with neighbours(lora_server) as answers:
        place(first, directory / "sql")
        added = text(lora_server, "sql")
        assert added == alone  # the same weights under another name
        place(second, directory / "sql")
        wait_for(lambda: text(lora_server, "sql") != added)
        replaced = text(lora_server, "sql")
        place(second, directory / "other")
        assert text(lora_server, "other") == replaced
        shutil.rmtree(directory / "sql")
        wait_for(lambda: text(lora_server, "sql") == "LoRA sql is not supported")
        assert text(lora_server, "other") == replaced
        wait_for(lambda: log(lora_server).count("was unloaded") == 2)
        place(first, directory / "sql")
        assert text(lora_server, "sql") == alone
    assert set(answers) == {alone}
    assert len({alone, replaced, base}) == 3
    assert text(lora_server, None) == base


def test_no_more_than_vllm_holds_and_the_others_make_room(
    lora_server: TritonServer, made_models: MadeModels, directory: Path
) -> None:
    """With one of three places taken by multi_lora.json, a third folder's adapter takes the place of the one used longest ago."""
    first, second = made_models.adapters
    answers = {}
    for name, adapter in (("x", first), ("y", second), ("z", first)):
        place(adapter, directory / name)
        answers[name] = text(lora_server, name)
    assert answers["x"] == answers["z"] == text(lora_server, "fixed") != answers["y"]
    assert [text(lora_server, name) for name in ("x", "y", "z")] == list(answers.values())
    for name in answers:
        shutil.rmtree(directory / name)


@pytest.mark.parametrize("name", ["../fixed", "/etc", "a/b", "..", ".hidden", "", "out", "x" * 200])
def test_names_lead_nowhere_else(lora_server: TritonServer, made_models: MadeModels, directory: Path, name: str) -> None:
    """A name is one component; a link out of the directory is no adapter; the text tells no path and no other's name."""
    if not (directory / "out").is_symlink():
        (directory / "out").symlink_to(made_models.adapters[0])
        shutil.copytree(made_models.adapters[0], directory / ".hidden")
    error = ask(lora_server, PROMPT, named(None) | {"lora_name": name}).error
    assert error.startswith("LoRA ")
    assert "is not supported" in error
    assert "fixed" not in error.replace(name, "")
    assert str(directory) not in error


def test_a_broken_adapter_hurts_nobody(lora_server: TritonServer, made_models: MadeModels, directory: Path) -> None:
    """Its request is told to come again, the log has vLLM's reason, and once it is mended it answers."""
    place(made_models.adapters[0], directory / "broken")
    (directory / "broken" / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    assert text(lora_server, "broken") == "LoRA broken could not be loaded; the server's log has the reason"
    wait_for_line(lora_server, "LoRA adapter 'broken' could not be loaded: ")
    place(made_models.adapters[0], directory / "broken")
    assert text(lora_server, "broken") == text(lora_server, "fixed")


def test_an_engine_that_comes_back_finds_its_adapters(
    lora_server: TritonServer, made_models: MadeModels, directory: Path
) -> None:
    """The new one has none; they are loaded at their next use."""
    place(made_models.adapters[1], directory / "sql")
    before = text(lora_server, "sql")
    below = psutil.Process(lora_server.pid).children(recursive=True)
    (engine,) = [process for process in below if process.name().startswith("VLLM::EngineCor")]
    engine.kill()
    wait_for(lambda: "the engine is back" in log(lora_server))
    assert text(lora_server, "sql") == before
    wait_for(lambda: log(lora_server).count("LoRA adapter sql@") >= 2)
