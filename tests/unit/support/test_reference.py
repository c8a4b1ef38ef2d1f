"""A kept reference answer is the answer to the same question only."""

from __future__ import annotations

import pytest

from support import reference


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Return a function that asks, and the requests that were computed."""
    computed = []
    monkeypatch.setenv("VLLM_ENV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        reference, "run_reference", lambda environment, program, request: computed.append(request) or len(computed)
    )
    (tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "vllm-1.dist-info").mkdir(parents=True)

    def ask(model, tokens=4, program="reference_engine.py"):
        return reference.kept_reference(tmp_path / "env", program, {"model": str(model), "tokens": tokens}, model)

    return ask, computed


def test_an_answer_is_computed_once_for_a_program_its_packages_a_model_and_a_request(asked, tmp_path):
    """Wherever the model lies; anything else is another question."""
    ask, computed = asked
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for folder, weights in ((one, "w"), (same, "w"), (other, "v")):
        folder.mkdir()
        (folder / "weights").write_text(weights)
    assert [ask(one), ask(one), ask(same)] == [1, 1, 1]
    assert [ask(other), ask(one, tokens=5), ask(one, program="reference_transformers.py")] == [2, 3, 4]
    (tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "torch-2.dist-info").mkdir()
    assert [ask(one), ask(one)] == [5, 5]
    assert len(computed) == 5
