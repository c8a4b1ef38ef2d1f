"""LoRA adapters are read at load and asked for by name."""

from __future__ import annotations

import json

import pytest

from triton_vllm.errors import ConfigError, InvalidRequestError
from triton_vllm.loading.lora import read


def make(*args):
    return args


@pytest.fixture
def model(tmp_path):
    """A model directory with one adapter beside its version."""
    (tmp_path / "1").mkdir()
    (tmp_path / "adapters" / "a").mkdir(parents=True)
    (tmp_path / "adapters" / "a" / "adapter_config.json").write_text("{}")
    return tmp_path


def write(model, table):
    (model / "multi_lora.json").write_text(json.dumps(table))


def test_adapters_by_name(model):
    """Paths are relative to the model; a name of a model hub stays as it is; each has its own number."""
    write(model, {"a": "adapters/a", "hub": "org/name"})
    adapters = read(model, model / "1", enabled=True, make=make)
    assert adapters.request("a") == ("a", 1, str(model / "adapters" / "a"))
    assert adapters.request("hub") == ("hub", 2, "org/name")
    assert adapters.request(None) is None


def test_the_versions_own_file_wins(model):
    """The official backend keeps multi_lora.json in the version's directory."""
    write(model, {"a": "org/a"})
    (model / "1" / "multi_lora.json").write_text('{"b": "org/b"}')
    assert list(read(model, model / "1", enabled=True, make=make).requests) == ["b"]


def test_errors_of_requests_in_the_official_words_without_other_names(model):
    """Clients match on these; names of other tenants' adapters are not told."""
    write(model, {"secret": "org/a"})
    with pytest.raises(InvalidRequestError, match=r"^LoRA x is not supported$"):
        read(model, model / "1", enabled=True, make=make).request("x")
    with pytest.raises(InvalidRequestError, match=r"^LoRA feature is not enabled\.$"):
        read(model, model / "1", enabled=False, make=make).request("x")


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (None, "Triton backend cannot find"),
        ([], "must map names to paths"),
        ({"a": 1}, "must map names to paths"),
        ({"a": "./nowhere"}, "LoRA adapter 'a': there is no directory"),
        ({"a": "adapters"}, "LoRA adapter 'a': .* has no adapter_config.json"),
    ],
)
def test_bad_files_stop_the_load(model, table, says):
    """The message names the adapter and the path."""
    if table is not None:
        write(model, table)
    with pytest.raises(ConfigError, match=says):
        read(model, model / "1", enabled=True, make=make)
