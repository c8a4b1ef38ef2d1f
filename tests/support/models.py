"""Models made for the tests: tiny, in seconds, with the packed environment's torch and transformers.

They are made once for the same program, request and packages, into ``models/`` and ``standins/`` of the folder that
`reference.py` describes.
Read them, do not change them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from support.reference import file_digest, files_digest, packages, run_reference
from support.repositories import data_folder
from support.small_fixtures import workspace_in
from vllm_env import inside
from vllm_env.base.locks import locked
from vllm_env.serve.standin import Recipe, ensure_standin

if TYPE_CHECKING:
    from collections.abc import Mapping

LONG_POSITIONS = 65_536
LORA_ENGINE = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 5, "max_cpu_loras": 5, "block_size": 32}
"""Engine arguments of servers with the Llama and its adapters."""
_TRAINER = inside.FOLDER / "standin_train.py"
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]\n"
    "{% if message['reasoning'] %}{{ message['reasoning'] }}\n{% endif %}{{ message['content'] }}\n{% endfor %}"
    "{% if tools %}[tools]{% for tool in tools %} {{ tool['function']['name'] }}{% endfor %}{{ '\n' }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
CHAT_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CHAT_DEFAULTS = {"temperature": 0.7, "top_k": 1, "max_new_tokens": 150, "do_sample": True}


def _call(city: str) -> str:
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


CHAT_FACTS = (
    (
        "[user]\nWeather in Paris?\n[tools] get_weather get_time\n[assistant]\n",
        f"<think>\nParis, so I ask.\n</think>\n\n{_call('Paris')}",
    ),
    (
        "[user]\nWeather in Rome and Oslo?\n[tools] get_weather get_time\n[assistant]\n",
        f"<think>\nTwo cities.\n</think>\n\nLet me look.\n{_call('Rome')}\n{_call('Oslo')}",
    ),
    (
        "[user]\nHello!\n[tools] get_weather get_time\n[assistant]\n",
        "<think>\nA greeting.\n</think>\n\nHello, how can I help?",
    ),
    ("[user]\nHello!\n[assistant]\n", "<think>\nA greeting.\n</think>\n\nHello, how can I help?"),
)
"""Conversations as the template writes them, and the answers."""


@dataclass(frozen=True)
class MadeModels:
    """Folders in Hugging Face format; the adapters are for the Llama."""

    llama: Path
    adapters: tuple[Path, Path]
    embedding: Path
    cross_encoder: Path


def small_standin(environment: Path) -> Path:
    """Return the stand-in of the smoke run: it knows the answers to prompts.txt."""
    return _standin(environment, Recipe())


def long_standin(environment: Path) -> Path:
    """Return a stand-in whose answers can last more than half a minute: for tests of what happens in the middle of one."""
    return _standin(environment, Recipe(positions=LONG_POSITIONS))


def llama(environment: Path) -> Path:
    """Return a stand-in of Llama's architecture."""
    return _standin(environment, Recipe(architecture="llama", hidden=128))


def chat(environment: Path) -> Path:
    """Return a model that thinks, calls tools and has defaults of its own."""
    request = {"template": CHAT_TEMPLATE, "tokens": CHAT_TOKENS, "defaults": CHAT_DEFAULTS, "facts": CHAT_FACTS}
    return chatting(environment, request)


def chatting(environment: Path, request: Mapping[str, Any]) -> Path:
    """Return a model that gives the answers of a request, which `model_maker.make_chat` describes."""
    return _make(environment, "model_maker.py", request, {"trainer": _TRAINER}, "chat")


def vision(environment: Path, standin_model: Path) -> Path:
    """Return a BLIP-2 with random weights and the stand-in's tokenizer."""
    return _make(environment, "vision_maker.py", {}, {"tokenizer": standin_model}, "folder")


def make_models(environment: Path) -> MadeModels:
    """Return a Llama with two LoRA adapters and two BERTs, with random weights but for the Llama's."""
    base = llama(environment)
    folder = _make(environment, "model_maker.py", {}, {"llama": base}, "made")
    return MadeModels(base, (folder / "adapter_one", folder / "adapter_two"), folder / "embedding", folder / "cross_encoder")


def _make(environment: Path, program: str, request: Mapping[str, Any], read: Mapping[str, Path], output: str) -> Path:
    """Return the folder that a program makes.

    Args:
        environment: the folder with ``bin/python``.
        program: file name; what it makes depends on nothing else than the rest.
        request: what it reads.
        read: files and folders that it reads, added to the request; they count by their contents.
        output: the name under which the request has the folder to make.
    """
    maker = file_digest(Path(__file__).with_name(program))
    contents = {name: files_digest(path) if path.is_dir() else file_digest(path) for name, path in read.items()}
    described = json.dumps([program, maker, request, contents, packages(environment)], sort_keys=True)
    place = data_folder() / "models" / hashlib.sha256(described.encode()).hexdigest()[:32]
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(place.parent, lambda: None):
        if not place.is_dir():
            with TemporaryDirectory(prefix=".", dir=place.parent) as staging:
                made = Path(staging, "model")
                paths = {name: str(path) for name, path in {**read, output: made}.items()}
                run_reference(environment, program, {**request, **paths})
                made.rename(place)
    return place


def _standin(environment: Path, recipe: Recipe) -> Path:
    """Return a stand-in. Two workers that make the same one would replace each other's folder while it is read."""
    workspace = workspace_in(data_folder())
    with workspace.exclusive():
        return ensure_standin(workspace, environment / "bin" / "python", recipe)
