"""What a model can score, and how two texts are put together, is asked of vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from triton_vllm.vllm_api.scoring import scoring_task


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
