"""Where no model hub answers, a model that nobody has set up serves the stand-in."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from support.repositories import CHECKOUT
from support.small_fixtures import workspace_in
from vllm_env.base.network import Network
from vllm_env.publish.model_folder import write_engine_args
from vllm_env.serve import without_hub
from vllm_env.serve.without_hub import EXAMPLE_MODEL, is_fetchable, offer_standin

if TYPE_CHECKING:
    from pathlib import Path

_TEMPLATE = CHECKOUT / "model_repository" / "vllm"


def test_the_example_names_the_model_that_is_looked_for() -> None:
    """Or another one would be asked for than the one that vLLM will load."""
    assert json.loads((_TEMPLATE / "vllm_engine_args.example.json").read_text())["model"] == EXAMPLE_MODEL


def test_a_model_is_fetchable_where_it_is_cached_or_the_hub_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a real port that listens, or not any more; switched off, the hub is not asked."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    workspace = replace(workspace_in(tmp_path / "cache"), network=Network())
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        assert is_fetchable(workspace, "a/model")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert not is_fetchable(workspace, "a/model")
        monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert not is_fetchable(workspace, "a/model")
    snapshot = tmp_path / "hub" / "models--a--model" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    assert not is_fetchable(workspace, "a/model")  # an interrupted download
    (snapshot / "config.json").touch()
    assert is_fetchable(workspace, "a/model")


def test_a_model_that_nobody_has_set_up_serves_the_standin(tmp_path: Path) -> None:
    """Its folder goes with the repository, by a name that holds wherever that is mounted; edited arguments stay."""
    model, standin = tmp_path / "vllm", tmp_path / "cache" / "standin"
    for folder in (model, standin):
        folder.mkdir(parents=True)
    (standin / "config.json").write_text("{}")
    assert not offer_standin(_TEMPLATE, model, standin, {})
    write_engine_args(_TEMPLATE, model)
    assert offer_standin(_TEMPLATE, model, standin, {"model": str(standin), "dtype": "float32"})
    arguments = model / "vllm_engine_args.json"
    assert json.loads(arguments.read_text()) == {"model": "standin", "dtype": "float32"}
    assert (model / "standin" / "config.json").is_file()
    arguments.write_text('{"model": "/mine"}')
    assert not offer_standin(_TEMPLATE, model, standin, {"model": str(standin)})
    assert arguments.read_text() == '{"model": "/mine"}'


@pytest.mark.parametrize("link", [False, True])
def test_a_users_own_folder_of_the_standins_name_stays(tmp_path: Path, link: bool) -> None:
    """It may hold a model; only an equal copy of the stand-in is taken for one."""
    model, standin = tmp_path / "vllm", tmp_path / "cache" / "standin"
    for folder in (model, standin, tmp_path / "mine"):
        folder.mkdir(parents=True)
    for folder in (standin, tmp_path / "mine"):
        (folder / "config.json").write_text("{}")
    (tmp_path / "mine" / "weights").write_text("mine")
    write_engine_args(_TEMPLATE, model)
    before = (model / "vllm_engine_args.json").read_bytes()
    place = model / "standin"
    place.symlink_to("../mine") if link else (tmp_path / "mine").rename(place)
    assert not offer_standin(_TEMPLATE, model, standin, {})
    assert (place / "weights").read_text() == "mine"
    assert place.is_symlink() is link
    assert (model / "vllm_engine_args.json").read_bytes() == before
    (place / "weights").unlink()
    assert offer_standin(_TEMPLATE, model, standin, {}) is not link


@pytest.mark.parametrize(
    ("arguments", "hub", "said"),
    [
        ({"model": "a/model"}, True, ""),
        ({"model": "a/model"}, False, "no model hub answers"),
        ({"model": "/none/here"}, True, "there is no folder /none/here"),
        ({"model": "a/model", "runner": "pooling"}, True, "it does not answer with text"),
        ({"model": "a/model", "task": "embed"}, True, "it does not answer with text"),
        ({}, True, "the engine arguments name no model"),
    ],
)
def test_an_adopted_model_is_served_itself_where_that_can_be(
    arguments: dict[str, str],
    hub: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else the stand-in is, and why is said."""
    monkeypatch.setattr(without_hub, "is_fetchable", lambda *_: hub)
    own = {"1/model.json": arguments, "1/multi_lora.json": {"a": "/b"}}
    assert without_hub.own_model(workspace_in(tmp_path), own) == ({} if said else own)
    assert (said or "with the model's own engine arguments") in capsys.readouterr().err


def test_a_model_in_a_folder_needs_no_hub(tmp_path: Path) -> None:
    """Its weights are here."""
    own = {"1/model.json": {"model": str(tmp_path)}}
    assert without_hub.own_model(workspace_in(tmp_path), own) == own
