"""What the adapter uses of vLLM is listed, so that the list cannot fall behind; read from its sources."""

from __future__ import annotations

import shutil

import pytest

from api_contract import adapter, needs
from contract.unlisted import unlisted
from triton_vllm.startup.toolkit import SWITCHES
from triton_vllm.vllm_api.names import OPTIONAL_PLACES, PLACES
from triton_vllm.vllm_api.openai import SERVER_PLACES

pytestmark = pytest.mark.long

ADD = "add to tools/api_contract/needs.py what the adapter uses now"
# what is added to a module of the adapter, and how it is told
UNLISTED = {
    "a method of the engine": ("vllm_api/engine.py", "def f(llm):\n    return llm.pin_lora(1)\n", "AsyncLLM.pin_lora"),
    "a keyword": ("vllm_api/engine.py", "def f(llm):\n    llm.add_lora(lora_request=1, pin=2)\n", "AsyncLLM.add_lora(pin=)"),
    "an attribute that may be there": (
        "engine/engine.py",
        "def f(llm):\n    return getattr(llm, 'dead_error', 0)\n",
        "'dead_error'",
    ),
    "an attribute that is asked for": ("vllm_api/prompts.py", "def f(x):\n    return hasattr(x, 'warmup')\n", "'warmup'"),
    "a member of an enum": ("vllm_api/fields.py", "def f(vllm):\n    return vllm.RequestOutputKind.CUMULATIVE\n", "CUMULATIVE"),
    "a constructor's keyword": (
        "vllm_api/prompts.py",
        "def f(vllm):\n    vllm.ChatParams(media_io_kwargs={})\n",
        "media_io_kwargs",
    ),
    "of the model's configuration": (
        "vllm_api/engine.py",
        "def f(llm):\n    return llm.model_config.dtype\n",
        "ModelConfig.dtype",
    ),
    "a module": ("vllm_api/platform.py", "PLACE = 'vllm.tasks'\n", "module vllm.tasks"),
}


def test_what_the_adapter_uses_is_listed():
    """Each line names the place of the use."""
    assert unlisted(adapter.read()) == [], ADD


@pytest.fixture
def copy(tmp_path):
    """A copy of the adapter."""
    shutil.copytree(adapter.VERSION_FOLDER / "triton_vllm", tmp_path / "triton_vllm")
    return tmp_path


def test_what_is_not_listed_is_named(copy):
    """Of the attributes that are read from the engine and from vLLM's classes, of modules and of keywords: a line each."""
    for file, text, _ in UNLISTED.values():
        path = copy / "triton_vllm" / file
        path.write_text(path.read_text("utf-8") + "\n\n" + text, "utf-8")
    lines = unlisted(adapter.read(copy), copy)
    named = {
        what: [line for line in lines if line.startswith(f"triton_vllm/{file}: ") and told in line]
        for what, (file, _, told) in UNLISTED.items()
    }
    assert [what for what, found in named.items() if len(found) != 1] == []
    assert len(lines) == len(UNLISTED)


def test_a_name_of_unknown_age_is_named(copy):
    """A name that only some versions have must say since when it is required."""
    path = copy / "triton_vllm" / "vllm_api" / "names.py"
    text = path.read_text("utf-8")
    path.write_text(text.replace('    "ChatParams": (', '    "Parser": ("vllm.parser",),\n    "ChatParams": ('), "utf-8")
    assert unlisted(adapter.read(copy), copy) == ["needs.SINCE: Parser"]


def test_protocols_and_variables_are_needs_by_themselves(copy):
    """What a protocol declares must be there, since the version that it names; so must each variable that is set or read."""
    protocols = copy / "triton_vllm" / "base" / "protocols.py"
    more = '\n    async def reset_cache(self, level: int) -> bool:\n        """Forget, since 0.31."""\n'
    more += '\n    @property\n    def depth(self) -> int:\n        """How deep it sleeps, since 0.32."""\n'
    protocols.write_text(protocols.read_text("utf-8") + more, "utf-8")  # the last class is the engine
    (copy / "triton_vllm" / "startup" / "more.py").write_text('NAME = "VLLM_OF_TOMORROW"\n')
    read = adapter.read(copy)
    assert read.classes["vllm.v1.engine.async_llm.AsyncLLM"]["reset_cache"] == needs.Member(
        ("level",), awaited=True, since="0.31"
    )
    assert read.classes["vllm.v1.engine.async_llm.AsyncLLM"]["depth"] == needs.Member(since="0.32")
    assert read.variables["VLLM_OF_TOMORROW"] == needs.OLDEST


def test_each_switch_is_needed_since_the_version_that_its_entry_names():
    """So a vLLM that no longer knows one is wrong, and the entry goes or changes."""
    variables = adapter.read().variables
    assert {switch.variable: variables[switch.variable] for switch in SWITCHES} == {s.variable: s.since for s in SWITCHES}


def test_the_places_are_those_that_the_adapter_imports_from():
    """They are read without importing it."""
    assert adapter.read().places == {**PLACES, **OPTIONAL_PLACES, **SERVER_PLACES}
