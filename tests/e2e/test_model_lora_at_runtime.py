"""LoRA adapters of LORA_DIRECTORY come, change and go while the model serves."""

from __future__ import annotations

import shutil
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from support.model_requests import ask, ask_all, prompt
from support.patience import wait_for, wait_for_line
from triton_vllm.lora.config import UNLISTED
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.models import MadeModels
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
QUESTION, ANSWER = FACTS[2]
PROMPT = f"{QUESTION} {ANSWER}. " * 4 + QUESTION  # several blocks of the prefix cache
GREEDY: dict[str, object] = {"temperature": 0, "max_tokens": 24}
MANY = 10  # adapters; the server keeps five in memory (`support.models.LORA_ENGINE`)


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


def copies(server: TritonServer) -> set[str]:
    """Return the names of the private copies of adapters."""
    assert server._scratch is not None
    return {path.name for path in server._scratch.glob("vllm_env_server_lora_*/*")}


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
    llama_server: TritonServer, made_models: MadeModels, lora_directory: Path, tmp_path: Path
) -> None:
    """Each time by its folder alone; the answers of others, and of the prefix cache, never hold anything of the wrong one."""
    first, second = made_models.adapters
    same = tmp_path / "same"  # as the first, in another version
    shutil.copytree(first, same)
    (same / "adapter_config.json").write_text((first / "adapter_config.json").read_text() + "\n")
    assert text(llama_server, "sql") == "LoRA sql is not supported"
    alone, base = text(llama_server, "fixed"), text(llama_server, None)
    wait_for_line(llama_server, UNLISTED)
    with neighbours(llama_server) as answers:
        place(same, lora_directory / "sql")
        assert text(llama_server, "sql") == alone
        before = copies(llama_server)
        place(second, lora_directory / "sql")
        replaced = text(llama_server, "sql")
        place(second, lora_directory / "other")
        assert text(llama_server, "other") == replaced
        shutil.rmtree(lora_directory / "sql")
        assert text(llama_server, "sql") == "LoRA sql is not supported"
        assert text(llama_server, "other") == replaced
        place(first, lora_directory / "sql")
        assert text(llama_server, "sql") == alone
    wait_for(lambda: before - copies(llama_server), "the end of the copy that was replaced")
    assert set(answers) == {alone}
    assert len({alone, replaced, base}) == 3
    assert text(llama_server, None) == base


def test_there_may_be_more_adapters_than_vllm_holds(
    llama_server: TritonServer, made_models: MadeModels, lora_directory: Path
) -> None:
    """It holds five, drops the one used longest ago, and reads it again from its copy, one at a time and many at once."""
    names = [f"more_{number}" for number in range(MANY)]
    for number, name in enumerate(names):
        place(made_models.adapters[number % 2], lora_directory / name)
    expected = [text(llama_server, ("one", "two")[number % 2]) for number in range(len(names))]
    for _ in range(2):
        assert [text(llama_server, name) for name in names] == expected
    requests = [prompt(PROMPT, named(name), stream=True, exclude_input_in_output=True) for name in names]
    assert [answer.error or answer.text for answer in ask_all(llama_server, requests)] == expected
    for name in names:
        shutil.rmtree(lora_directory / name)


@pytest.mark.parametrize("name", ["../fixed", "/etc", "a/b", "..", ".hidden", "", "out", "x" * 200])
def test_names_lead_nowhere_else(llama_server: TritonServer, made_models: MadeModels, lora_directory: Path, name: str) -> None:
    """A name is one component; a link out of the directory is no adapter; the text tells no path and no other's name."""
    if not (lora_directory / "out").is_symlink():
        (lora_directory / "out").symlink_to(made_models.adapters[0])
        shutil.copytree(made_models.adapters[0], lora_directory / ".hidden")
    error = ask(llama_server, PROMPT, named(None) | {"lora_name": name}).error
    assert error.startswith("LoRA ")
    assert "is not supported" in error
    assert "fixed" not in error.replace(name, "")
    assert "two" not in error
    assert str(lora_directory) not in error


def test_a_broken_adapter_hurts_nobody(llama_server: TritonServer, made_models: MadeModels, lora_directory: Path) -> None:
    """Its request is told to come again, the log has vLLM's reason, and once it is mended it answers."""
    place(made_models.adapters[0], lora_directory / "broken")
    (lora_directory / "broken" / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    assert text(llama_server, "broken") == "LoRA broken could not be loaded; the server's log has the reason"
    wait_for_line(llama_server, "LoRA adapter 'broken' could not be loaded: ")
    place(made_models.adapters[0], lora_directory / "broken")
    assert text(llama_server, "broken") == text(llama_server, "fixed")
