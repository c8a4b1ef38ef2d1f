"""LoRA adapters are read at load and asked for by name."""

from __future__ import annotations

import json

import pytest

from triton_vllm.base.errors import ConfigError, InvalidRequestError, UnavailableError
from triton_vllm.lora.config import is_listed, read


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


def test_officially_a_path_that_is_no_adapters_takes_only_its_own_requests_away(model):
    """The official backend leaves it to vLLM, which finds out when the adapter is asked for."""
    write(model, {"gone": "./nowhere", "a": "adapters/a"})
    adapters = read(model, model / "1", enabled=True, make=make, official=True)
    assert adapters.request("a")[2] == str(model / "adapters" / "a")
    assert "nowhere" in adapters.broken["gone"]
    with pytest.raises(UnavailableError, match="LoRA gone could not be loaded; the server's log has the reason"):
        adapters.request("gone")
    with pytest.raises(InvalidRequestError, match=r"^LoRA b is not supported, we currently support \['a', 'gone'\]$"):
        adapters.request("b")


def test_paths_may_start_where_the_server_was_started(model, monkeypatch):
    """As in the official backend; the model's own folder wins, unless the official behaviour is asked for."""
    write(model, {"a": "adapters/a"})
    server = model / "server"
    (server / "adapters" / "a").mkdir(parents=True)
    (server / "adapters" / "a" / "adapter_config.json").write_text("{}")
    monkeypatch.chdir(server)
    own, there = str(model / "adapters" / "a"), str(server / "adapters" / "a")
    assert read(model, model / "1", enabled=True, make=make).request("a")[2] == own
    assert read(model, model / "1", enabled=True, make=make, official=True).request("a")[2] == there
    (model / "adapters" / "a" / "adapter_config.json").unlink()
    (model / "adapters" / "a").rmdir()
    assert read(model, model / "1", enabled=True, make=make).request("a")[2] == there


def test_a_home_is_a_place_to_start(model, monkeypatch):
    """vLLM would look there, too."""
    write(model, {"a": "~/adapters/a"})
    monkeypatch.setenv("HOME", str(model))
    assert read(model, model / "1", enabled=True, make=make).request("a")[2] == str(model / "adapters" / "a")


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "\ud800"])
def test_a_strange_name_is_told_readably(model, name):
    """A NUL ends the server's texts, and a line break makes another line of its log."""
    write(model, {"a": "adapters/a"})
    with pytest.raises(InvalidRequestError) as caught:
        read(model, model / "1", enabled=True, make=make).request(name)
    assert str(caught.value) == f"LoRA {name!r} is not supported".replace("'", "")


def test_a_directory_may_have_what_the_file_has_not(model):
    """The engine looks a possible name up there; a fixed one, and one that is no folder's name, never gets there."""
    (model / "many").mkdir()
    write(model, {"a": "adapters/a"})
    adapters = read(model, model / "1", enabled=True, make=make, directory="many")
    assert adapters.directory == model / "many"
    assert adapters.request("a") == ("a", 1, str(model / "adapters" / "a"))
    assert adapters.request("b") is None
    for name in ("../a", "a/b", "", ".a"):
        with pytest.raises(InvalidRequestError, match="is not supported"):
            adapters.request(name)
    (model / "multi_lora.json").unlink()
    assert read(model, model / "1", enabled=True, make=make, directory="many").requests == {}


def test_a_directory_must_be_there_and_needs_lora(model):
    """Else the first request would find out."""
    with pytest.raises(ConfigError, match=r"LORA_DIRECTORY: there is no directory .*nowhere"):
        read(model, model / "1", enabled=True, make=make, directory="nowhere")
    with pytest.raises(ConfigError, match="LORA_DIRECTORY needs the engine argument enable_lora"):
        read(model, model / "1", enabled=False, make=make, directory="adapters")


def test_the_frontend_needs_both_files_in_the_versions_folder(model):
    """One beside it, or one of them alone, is as none."""
    write(model, {"a": "adapters/a"})
    (model / "1" / "model.json").write_text('{"enable_lora": true}')
    assert not is_listed(model / "1")
    (model / "1" / "multi_lora.json").write_text("{}")
    assert is_listed(model / "1")
    assert read(model, model / "1", enabled=True, make=make).requests == {}
    (model / "1" / "model.json").unlink()
    assert not is_listed(model / "1")
