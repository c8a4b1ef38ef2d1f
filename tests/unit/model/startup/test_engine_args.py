"""`vllm_engine_args.json` is understood on every vLLM: values coerced, removed names mapped, unknown ones refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triton_vllm.base.errors import ConfigError
from triton_vllm.startup.engine_args import FILE_NAME, failure, fit, place, read, unfetched

DECLARED = {
    "model": str,
    "max_model_len": int,
    "enforce_eager": bool,
    "gpu_memory_utilization": float,
    "enable_log_requests": bool,
    "runner": str,
    "convert": str,
    "structured_outputs_config": dict[str, Any],
    "hf_overrides": dict[str, Any],
    "distributed_executor_backend": str | None,
}


def test_published_file_fits_a_vllm_without_its_removed_argument():
    """The tutorial's file, with an argument that vLLM removed and a string for a boolean, gives one warning."""
    path = Path(__file__).parents[4] / "model_repository" / "vllm" / "vllm_engine_args.example.json"
    fitted = fit(json.loads(path.read_text()), DECLARED)
    assert fitted.values == {"model": "facebook/opt-125m", "gpu_memory_utilization": 0.5}
    assert fitted.warning.count("disable_log_requests") == 1


def test_strings_are_coerced():
    """A string for a number or a boolean counts as what it spells."""
    fitted = fit({"max_model_len": "512", "enforce_eager": "false"}, DECLARED)
    assert fitted.values == {"max_model_len": 512, "enforce_eager": False}
    assert fitted.warning == ""


def test_null_means_the_default():
    """Null is left to vLLM whatever the declared type."""
    assert fit({"max_model_len": None}, DECLARED).values == {}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"disable_log_requests": "false"}, {"enable_log_requests": True}),
        ({"task": "embed"}, {"runner": "pooling", "convert": "embed"}),
        ({"swap_space": 4}, {}),
        ({"guided_decoding_backend": "xgrammar"}, {"structured_outputs_config": {"backend": "xgrammar"}}),
        (
            {"guided_decoding_backend": "x", "structured_outputs_config": {"disable_fallback": True}},
            {"structured_outputs_config": {"disable_fallback": True, "backend": "x"}},
        ),
        ({"worker_use_ray": "true"}, {"distributed_executor_backend": "ray"}),
        ({"rope_theta": 1e6}, {"hf_overrides": {"rope_theta": 1e6}}),
    ],
)
def test_removed_arguments_are_mapped(given, expected):
    """What vLLM renamed keeps its meaning; what it dropped is ignored; the warning names each."""
    fitted = fit(given, DECLARED)
    assert fitted.values == expected
    assert next(iter(given)) in fitted.warning


def test_an_argument_that_vllm_still_has_is_not_mapped():
    """The table of removed names is used only where the installed vLLM lacks the name."""
    assert fit({"task": "embed"}, {"task": str}).values == {"task": "embed"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_model_length": 5}, "no engine argument 'max_model_length', did you mean 'max_model_len'?"),
        ({"disable_log_requests": "perhaps"}, "disable_log_requests must be true or false"),
    ],
)
def test_wrong_arguments_are_refused_by_name(given, says):
    """A typo or an ill-typed value stops the load with the argument's name and the closest known one."""
    with pytest.raises(ConfigError) as caught:
        fit(given, DECLARED)
    assert says in str(caught.value)


def test_read_says_what_is_wrong_with_the_file(tmp_path):
    """Missing, ill-formed and wrong-shaped files are told apart."""
    version = tmp_path / "1"
    version.mkdir()
    with pytest.raises(ConfigError, match="is missing"):
        read(tmp_path, version)
    (tmp_path / FILE_NAME).write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read(tmp_path, version)
    (tmp_path / FILE_NAME).write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        read(tmp_path, version)


def test_read_takes_the_official_backends_file(tmp_path):
    """A repository made for the official backend keeps its model.json in the version's directory."""
    version = tmp_path / "1"
    version.mkdir()
    (version / "model.json").write_text('{"model": "a"}')
    assert read(tmp_path, version) == {"model": "a"}


def test_two_files_are_one_truth(tmp_path):
    """The same in both is fine, however it is written; two that differ are refused with both names and what differs."""
    official = tmp_path / "1" / "model.json"
    official.parent.mkdir()
    official.write_text('{"model": "a", "max_model_len": 5}')
    (tmp_path / FILE_NAME).write_text('{"max_model_len": 5,\n "model": "a"}')
    assert read(tmp_path, official.parent) == {"model": "a", "max_model_len": 5}
    (tmp_path / FILE_NAME).write_text('{"model": "b", "dtype": null, "max_model_len": 5}')
    with pytest.raises(ConfigError, match=rf"^{FILE_NAME} and 1/model.json .* differ \(dtype, model\): .* remove {FILE_NAME}$"):
        read(tmp_path, official.parent)
    official.write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        read(tmp_path, official.parent)
    official.write_text(json.dumps({f"unknown_{number}" * 20: 1 for number in range(50)}))
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, official.parent)
    assert len(str(caught.value)) <= 500


def test_a_failed_start_is_told_on_one_line():
    """Triton shows one line as the model's state: it names the file, the model and vLLM's reason without its input."""
    error = ValueError("1 validation error\n  max_model_len (9) is too long [type=value_error, input_value={...}]")
    line = failure({"model": "org/name"}, error)
    assert "\n" not in line
    assert all(part in line for part in (FILE_NAME, "org/name", "max_model_len (9) is too long"))
    assert "input_value" not in line
    assert failure({"model": "/nowhere/at/all"}, error).endswith("model: there is no directory /nowhere/at/all")


def _from(cause: Exception, message: str) -> Exception:
    error = OSError(message)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("We couldn't connect to 'https://huggingface.co' to load the files"), "no model hub answers"),
        (_from(ConnectionError("Max retries exceeded"), "Can't load it"), "no model hub answers"),
        (
            ValueError("org/name is not a local folder and is not a valid model identifier"),
            "not found on the model hub",
        ),
        (_from(OSError("404 Client Error"), "no file named config.json"), "not found on the model hub"),
    ],
)
def test_a_model_that_cannot_be_fetched_is_one_line(error: Exception, said: str) -> None:
    """It names the model, what is wrong and the remedy, wherever in the chain of errors that stands."""
    line = unfetched({"model": "org/name"}, error)
    assert said in line
    assert "'org/name'" in line
    assert FILE_NAME in line
    assert "\n" not in line


def test_other_failures_are_told_as_they_are() -> None:
    """An error of the engine, and a folder's, are none of the hub."""
    assert unfetched({"model": "org/name"}, ValueError("max_model_len is too large")) == ""
    assert unfetched({"model": "/a/folder"}, OSError("not a valid model identifier")) == ""


def test_a_folder_in_the_models_directory_is_named_as_it_is(tmp_path: Path) -> None:
    """So that a repository that brings its weights works wherever it is mounted; other names are the hub's."""
    (tmp_path / "standin").mkdir()
    elsewhere = ("facebook/opt-125m", ".", "..", "/tmp", "a" * 300, "nul\0")
    for model, read_as in (("standin", str(tmp_path / "standin")), *((name, name) for name in elsewhere)):
        (tmp_path / FILE_NAME).write_text(json.dumps({"model": model, "tokenizer": None}), encoding="utf-8")
        assert read(tmp_path, tmp_path / "1") == {"model": read_as, "tokenizer": None}


@pytest.mark.parametrize("values", [{}, {"modle": "a"}, {"model": None}, {"model": ""}])
@pytest.mark.parametrize("file", ["vllm_engine_args.json", "1/model.json"])
def test_a_file_without_a_model_is_refused(values: dict[str, object], file: str, tmp_path: Path) -> None:
    """Else vLLM would look for a model of its own choice, or for one without a name."""
    (tmp_path / "1").mkdir()
    (tmp_path / file).write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=rf'^{file}: "model" is missing; write the name'):
        read(tmp_path, tmp_path / "1")


def test_the_file_that_was_read_is_named(tmp_path: Path) -> None:
    """The official backend's lies in the version's folder; whoever reads the error must find it."""
    version = tmp_path / "1"
    version.mkdir()
    (version / "model.json").write_text('{"model": "a", "modle": "a"}')
    assert place(tmp_path, version) == version / "model.json"
    with pytest.raises(ConfigError, match=r"^1/model.json: vLLM has no engine argument 'modle'"):
        fit(read(tmp_path, version), {"model": str}, "1/model.json")
    line = failure({"model": "org/name"}, RuntimeError("See root cause above"), "1/model.json", "ValueError: too large")
    assert line == "vLLM did not start with the arguments of 1/model.json, model 'org/name': ValueError: too large"
    (tmp_path / "vllm_engine_args.json").write_text("{}")
    assert place(tmp_path, version) == tmp_path / "vllm_engine_args.json"
