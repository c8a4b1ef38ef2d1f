"""What a model can score, and how two texts are put together, is asked of vLLM."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from triton_vllm.base.errors import UnsupportedError
from triton_vllm.engine.prompts import Prompter
from triton_vllm.pooling.embedding import Part
from triton_vllm.vllm_api.scoring import scoring_task

PLACE = "vllm.entrypoints.pooling.scoring"


def model(**config):
    return SimpleNamespace(model_config=SimpleNamespace(**config), vllm_config="config", renderer="renderer")


@pytest.mark.parametrize(
    ("tasks", "labels", "task"),
    [
        (("classify", "token_classify"), 1, "classify"),
        (("classify",), 2, ""),
        (("classify",), None, ""),
        (("embed", "token_embed"), 2, "embed"),
        (("generate",), 1, ""),
        (("token_embed",), 1, ""),
    ],
)
def test_what_a_model_scores_by(tasks, labels, task):
    """One label is a score, several are classes."""
    config = SimpleNamespace() if labels is None else SimpleNamespace(num_labels=labels)
    assert scoring_task(model(hf_config=config), tasks) == task


class Processor:
    """In place of vLLM's."""

    def __init__(self, vllm_config, renderer, chat_template_config):
        self.made = (vllm_config, renderer, chat_template_config)

    async def render_async(self, given):
        assert self.made == ("config", "renderer", "as {{ x }}")
        assert given["chat_template"] == "{{ x }}"
        assert given["tok_params"] == "as vLLM's server has them"
        return {"prompts": (given["data_1"], given["data_2"]), "params": f"{given['params']}, split"}


@pytest.fixture
def scoring(monkeypatch):
    """A vLLM with the class."""
    request = SimpleNamespace(build_tok_params=lambda config: "as vLLM's server has them")
    contents: dict[str, dict[str, Any]] = {
        f"{PLACE}.io_processor": {"ScoringIOProcessors": {"cross-encoder": Processor}},
        f"{PLACE}.protocol": {"ScoreTextRequest": lambda **_: request},
        "vllm.entrypoints.chat_utils": {"ChatTemplateConfig": lambda chat_template: f"as {chat_template}"},
    }
    for name, content in contents.items():
        made = ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)
    for name in ("vllm.entrypoints", "vllm.entrypoints.pooling", PLACE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def pair(llm):
    vllm, check = cast("Any", SimpleNamespace()), cast("Any", len)
    return asyncio.run(Prompter(vllm, {}, check, chat_template="{{ x }}").make_pair(llm, Part("q", second="d"), "params"))


@pytest.mark.usefixtures("scoring")
def test_pairs_are_put_together_by_vllms_own_class():
    """With the parameters that tell where the second text begins."""
    assert pair(model()) == (("q", "d"), "params, split")


def test_a_vllm_without_that_class_is_said_to_be_one(monkeypatch):
    """It may have another way, which nobody has tried."""
    monkeypatch.setitem(sys.modules, f"{PLACE}.io_processor", None)
    with pytest.raises(UnsupportedError, match="this vLLM does not read pairs of texts"):
        pair(model())
