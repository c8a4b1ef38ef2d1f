"""LoRA adapters are read at load and asked for by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.engine_parts import Log
from triton_vllm.base.errors import ConfigError, InvalidRequestError
from triton_vllm.lora.config import read


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
    """Paths are relative to the model; a name of a model hub stays as it is."""
    write(model, {"a": "adapters/a", "hub": "org/name"})
    adapters = read(model, model / "1", enabled=True, log=Log())
    assert adapters.find("a") == model / "adapters" / "a"
    assert adapters.find("hub") == "org/name"


def test_the_versions_own_file_wins(model):
    """The official backend keeps multi_lora.json in the version's directory."""
    write(model, {"a": "org/a"})
    (model / "1" / "multi_lora.json").write_text('{"b": "org/b"}')
    assert list(read(model, model / "1", enabled=True, log=Log()).listed) == ["b"]


def test_errors_of_requests_in_the_official_words_without_other_names(model):
    """Clients match on these; names of other tenants' adapters are not told."""
    write(model, {"secret": "org/a"})
    with pytest.raises(InvalidRequestError, match=r"^LoRA x is not supported$"):
        read(model, model / "1", enabled=True, log=Log()).find("x")
    with pytest.raises(InvalidRequestError, match=r"^LoRA feature is not enabled\.$"):
        read(model, model / "1", enabled=False, log=Log()).find("x")


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
        read(model, model / "1", enabled=True, log=Log())


def test_officially_a_path_that_is_no_adapters_is_no_reason_not_to_load(model):
    """The official backend leaves it to vLLM, which finds out when the adapter is asked for."""
    write(model, {"gone": "./nowhere", "half": "adapters", "a": "adapters/a"})
    log = Log()
    adapters = read(model, model / "1", enabled=True, log=log, official=True)
    assert adapters.find("a") == model / "adapters" / "a"
    gone = adapters.find("gone")
    assert isinstance(gone, Path)
    assert gone.name == "nowhere"
    told = [line.partition(":")[0] for line in log.lines if line.endswith("; its requests are refused")]
    assert told == ["LoRA adapter 'gone'", "LoRA adapter 'half'"]
    with pytest.raises(InvalidRequestError, match=r"^LoRA b is not supported, we currently support \['gone', 'half', 'a'\]$"):
        adapters.find("b")


def test_paths_may_start_where_the_server_was_started(model, monkeypatch):
    """As in the official backend; the model's own folder wins, unless the official behaviour is asked for."""
    write(model, {"a": "adapters/a"})
    server = model / "server"
    (server / "adapters" / "a").mkdir(parents=True)
    (server / "adapters" / "a" / "adapter_config.json").write_text("{}")
    monkeypatch.chdir(server)
    own, there = model / "adapters" / "a", server / "adapters" / "a"
    assert read(model, model / "1", enabled=True, log=Log()).find("a") == own
    assert read(model, model / "1", enabled=True, log=Log(), official=True).find("a") == there
    (model / "adapters" / "a" / "adapter_config.json").unlink()
    (model / "adapters" / "a").rmdir()
    assert read(model, model / "1", enabled=True, log=Log()).find("a") == there


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "\ud800"])
def test_a_strange_name_is_told_readably(model, name):
    """A NUL ends the server's texts, and a line break makes another line of its log."""
    write(model, {"a": "adapters/a"})
    with pytest.raises(InvalidRequestError) as caught:
        read(model, model / "1", enabled=True, log=Log()).find(name)
    assert str(caught.value) == f"LoRA {name!r} is not supported".replace("'", "")


def test_a_directory_may_have_what_the_file_has_not(model):
    """A name in the file wins."""
    (model / "many").mkdir()
    write(model, {"a": "adapters/a"})
    adapters = read(model, model / "1", enabled=True, log=Log(), directory="many")
    assert adapters.directory == model / "many"
    assert adapters.find("a") == model / "adapters" / "a"
    assert adapters.find("b") == model / "many" / "b"
    (model / "multi_lora.json").unlink()
    assert read(model, model / "1", enabled=True, log=Log(), directory="many").listed == {}


NAMES = ["a", "sql-v2", "A.b_c", "x" * 128]
NOT_NAMES = ["", ".", "..", "../a", "a/b", "a\\b", ".a", "-a", "a\0", "a\n", "a b", "a@b", "ä", "x" * 129]


@pytest.mark.parametrize("name", NAMES + NOT_NAMES)
def test_a_name_is_that_of_a_folder_in_the_directory(model, name):
    """No separator, nothing hidden, no path up, nothing that the name in vLLM could be mixed up with."""
    adapters = read(model, model / "1", enabled=True, log=Log(), directory="adapters")
    if name in NAMES:
        assert adapters.find(name) == model / "adapters" / name
    else:
        with pytest.raises(InvalidRequestError, match="is not supported"):
            adapters.find(name)


def test_a_directory_must_be_there_and_needs_lora(model):
    """Else the first request would find out."""
    with pytest.raises(ConfigError, match=r"LORA_DIRECTORY: there is no directory .*nowhere"):
        read(model, model / "1", enabled=True, log=Log(), directory="nowhere")
    with pytest.raises(ConfigError, match="LORA_DIRECTORY needs the engine argument enable_lora"):
        read(model, model / "1", enabled=False, log=Log(), directory="adapters")
