"""A kept reference answer is the answer to the same question only."""

from __future__ import annotations

import pytest

from support import reference


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Return a function that asks, and the requests that were computed."""
    computed = []
    monkeypatch.setenv("VLLM_ENV_TEST_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("VLLM_ENV_TEST_RUN", str(tmp_path))
    monkeypatch.delenv(reference.FRESH, raising=False)
    monkeypatch.setattr(
        reference, "run_reference", lambda environment, program, request: computed.append(request) or len(computed)
    )
    (tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "vllm-1.dist-info").mkdir(parents=True)

    def ask(model, tokens=4, program="reference_engine.py"):
        return reference.kept_reference(tmp_path / "env", program, {"model": str(model), "tokens": tokens}, model)

    return ask, computed


def made(folder, weights="w"):
    folder.mkdir()
    (folder / "weights").write_text(weights)
    return folder


def test_an_answer_is_computed_once_for_a_program_its_packages_a_model_and_a_request(asked, tmp_path):
    """Wherever the model lies; anything else is another question."""
    ask, computed = asked
    one, same, other = (made(tmp_path / name, weights) for name, weights in (("one", "w"), ("same", "w"), ("other", "v")))
    assert [ask(one), ask(one), ask(same)] == [1, 1, 1]
    assert [ask(other), ask(one, tokens=5), ask(one, program="reference_transformers.py")] == [2, 3, 4]
    (tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "torch-2.dist-info").mkdir()
    assert [ask(one), ask(one)] == [5, 5]
    assert len(computed) == 5


def test_another_program_is_another_question(asked, tmp_path, monkeypatch):
    """Also under the same name."""
    ask, _ = asked
    model = made(tmp_path / "one")
    (tmp_path / "programs").mkdir()
    program = tmp_path / "programs" / "reference_engine.py"
    monkeypatch.setattr(reference, "_FOLDER", program.parent)
    answers = []
    for code in ("1", "11", "1"):
        program.write_text(code)
        answers.append(ask(model))
    assert answers == [1, 2, 1]


def test_a_reference_that_fails_is_not_kept(asked, tmp_path, monkeypatch):
    """Nothing is left of it, and the next one asks again."""
    ask, _ = asked
    model = made(tmp_path / "one")
    with monkeypatch.context() as patch:
        patch.setattr(reference, "run_reference", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask(model)
    assert not list(tmp_path.glob("data/references/*"))
    assert ask(model) == 1


def test_a_fresh_run_asks_each_question_once(asked, tmp_path, monkeypatch):
    """An earlier run's answer is replaced."""
    ask, _ = asked
    model = made(tmp_path / "one")
    assert ask(model) == 1
    monkeypatch.setenv(reference.FRESH, "1")
    (tmp_path / "later").mkdir()
    monkeypatch.setenv("VLLM_ENV_TEST_RUN", str(tmp_path / "later"))
    assert [ask(model), ask(model)] == [2, 2]
    monkeypatch.delenv(reference.FRESH)
    assert ask(model) == 2
