"""A model folder of the official backend becomes a model of ours in another place, and stays what it was."""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING

import pytest

from support.official_folder import ARGUMENTS, CONFIG, manifest, names, snapshot
from support.repositories import CHECKOUT
from support.small_fixtures import workspace_in
from vllm_env.base.errors import VllmEnvError
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.model.files import check_model_folder
from vllm_env.publish import publish as publishing
from vllm_env.publish.adopt import read_adoption, stage_template
from vllm_env.publish.exchange import STAGING_PREFIX
from vllm_env.publish.model_folder import BuiltSet, set_environment_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vllm_env.base.workspace import Workspace

TEMPLATE = CHECKOUT / "model_repository" / "vllm"


@pytest.fixture(params=["exchange", "in place"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of publishing."""
    if request.param == "in place":
        monkeypatch.setattr(publishing, "staging_place", lambda _: None)


@pytest.fixture(scope="module", autouse=True)
def _small(small_template: Path) -> Iterator[None]:
    """Let each publish copy less and wait less for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "TEMPLATE", small_template)
        yield


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return workspace_in(tmp_path / "cache")


def adopt(workspace: Workspace, source: Path, target: Path, tag: str = "one") -> None:
    """Do what the command does, with a set whose files say ``tag``."""
    made = workspace.cache.root / "made"
    made.mkdir(parents=True, exist_ok=True)
    stub, environment = made / f"stub-{tag}", made / f"environment-{tag}"
    stub.write_text(tag)
    environment.write_text(tag)
    adoption = read_adoption(source, target, TEMPLATE, "vllm_env.tar.gz")
    with workspace.cache.staging() as staging:
        template = stage_template(adoption, TEMPLATE, staging / target.name)
        built = BuiltSet(stub, environment, LAYOUTS["archive"], manifest(source), "{}", adopted_from=source)
        publishing.publish(workspace, built, target.parent, target.name, template)


@pytest.mark.usefixtures("_way")
def test_it_becomes_a_model_of_ours(workspace: Workspace, official: Path, target: Path) -> None:
    """Small files are copied with their modes; weights, adapters and linked folders are named where they are."""
    before = snapshot(official)
    adopt(workspace, official, target)
    assert snapshot(official) == before
    built = {"triton_python_backend_stub", "vllm_env.tar.gz", "vllm_env.json", "vllm_env.cdx.json"}
    code = {"1/model.py", "1/node.py", "1/triton_vllm/__init__.py", "1/triton_vllm/request/contract.py"}
    theirs = {"config.pbtxt", "1/model.json", "1/multi_lora.json", "notes", "chat.jinja"}
    assert names(target) == built | code | theirs
    assert json.loads((target / "1/model.json").read_text()) == {**ARGUMENTS, "model": str(official / "weights")}
    adapters = {"sql": str(official / "adapters/sql"), "hub": "org/name"}
    assert json.loads((target / "1/multi_lora.json").read_text()) == adapters
    assert (target / "notes").read_text() == "{{ messages }}"
    assert not (target / "notes").is_symlink()
    text = (target / "config.pbtxt").read_text()
    assert text.startswith('# mine\nbackend: "python"\n')
    assert "$$TRITON_MODEL_DIRECTORY/vllm_env.tar.gz" in text
    assert stat.S_IMODE((target / "config.pbtxt").stat().st_mode) == 0o640
    assert stat.S_IMODE((target / "1/model.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((target / "1/triton_vllm/request/contract.py").stat().st_mode) & 0o444 == 0o444
    assert not list(target.parents[1].rglob(f"{STAGING_PREFIX}*"))


def test_any_byte_in_a_comment_stays(workspace: Workspace, official: Path, target: Path) -> None:
    """Triton takes a letter in Latin-1 there. What is shown of it can be printed."""
    comment = b"# caf\xe9\r\n"
    (official / "config.pbtxt").write_bytes(comment + CONFIG.encode())
    adoption = read_adoption(official, target, TEMPLATE, "vllm_env")
    assert "# caf\N{REPLACEMENT CHARACTER}" in adoption.difference
    adoption.difference.encode()
    adopt(workspace, official, target)
    assert (target / "config.pbtxt").read_bytes().startswith(comment + b'# mine\nbackend: "python"\n')
    set_environment_path(target, "vllm_env")
    text = (target / "config.pbtxt").read_bytes()
    assert text.startswith(comment)
    assert b"$$TRITON_MODEL_DIRECTORY/vllm_env" in text
    check_model_folder(target)
    assert not read_adoption(official, target, TEMPLATE, "vllm_env").difference


@pytest.mark.usefixtures("_way")
def test_again_it_refreshes_environment_and_code(workspace: Workspace, official: Path, target: Path) -> None:
    """The target's own files stay, whatever SOURCE has by now; of the code nothing old is left."""
    adopt(workspace, official, target)
    assert read_adoption(official, target, TEMPLATE, "vllm_env.tar.gz").difference == ""
    (target / "1/model.json").write_text('{"model": "other"}')
    (target / "config.pbtxt").write_text((target / "config.pbtxt").read_text() + "# edited\n")
    (target / "notes").unlink()
    (target / "mine").mkdir()
    (target / "mine/data.bin").write_text("mine")
    (target / "1/triton_vllm/request/contract.py").write_text("# old\n")
    (target / "1/triton_vllm/gone.py").write_text("# old\n")
    (target / "1/model.py").unlink()
    (target / "1/model.py").symlink_to(official / "chat.jinja")
    (official / "new").write_text("new")
    before = snapshot(official)
    kept = {name: (target / name).read_bytes() for name in ("1/model.json", "config.pbtxt", "mine/data.bin")}

    adoption = read_adoption(official, target, TEMPLATE, "vllm_env.tar.gz")
    assert adoption.outdated
    assert "-# old" in adoption.difference
    assert "1/triton_vllm/gone.py" in adoption.difference
    assert adoption.own == {"1/model.json": {"model": "other"}}
    adopt(workspace, official, target, "two")
    assert snapshot(official) == before
    assert (target / "vllm_env.tar.gz").read_text() == "two"
    for name in ("1/model.py", "1/triton_vllm/request/contract.py"):
        assert (target / name).read_bytes() == (TEMPLATE / name).read_bytes()
        assert not (target / name).is_symlink()
    assert not {"1/triton_vllm/gone.py", "notes", "new"} & names(target)
    assert {name: (target / name).read_bytes() for name in kept} == kept


@pytest.mark.usefixtures("_way")
def test_without_its_configuration_it_gets_only_what_it_lacks(
    workspace: Workspace,
    official: Path,
    target: Path,
) -> None:
    """And the code, as always. A folder that is a link now is the user's."""
    (official / "texts").mkdir()
    (official / "texts/one").write_text("theirs")
    (official / "texts/two").write_text("theirs")
    adopt(workspace, official, target)
    edited = {"1/model.json": '{"model": "other", "enable_lora": true}'}
    edited |= {"1/multi_lora.json": "{}", "chat.jinja": "mine"}
    for name, text in {**edited, "1/model.py": "# old", "1/triton_vllm/gone.py": "# old"}.items():
        (target / name).write_text(text)
    for name in ("config.pbtxt", "notes", "texts/one"):
        (target / name).unlink()
    (target / "texts").rename(target.parents[1] / "shared")
    (target / "texts").symlink_to(target.parents[1] / "shared")

    adoption = read_adoption(official, target, TEMPLATE, "vllm_env.tar.gz")
    assert adoption.outdated
    assert '+backend: "python"' in adoption.difference
    read = ("1/model.json", "1/multi_lora.json")
    assert adoption.own == {name: json.loads(edited[name]) for name in read}
    before = snapshot(official)
    adopt(workspace, official, target, "two")
    assert snapshot(official) == before
    assert {name: (target / name).read_text() for name in edited} == edited
    assert (target / "config.pbtxt").read_text() == adoption.config
    assert (target / "notes").read_text() == "{{ messages }}"
    assert (target / "1/model.py").read_bytes() == (TEMPLATE / "1/model.py").read_bytes()
    assert not (target / "1/triton_vllm/gone.py").exists()
    assert names(target / "texts") == {"two"}
    assert (target / "vllm_env.tar.gz").read_text() == "two"


def test_what_will_be_made_is_shown(official: Path, target: Path) -> None:
    """Configuration and rewritten arguments as a diff; what stays in SOURCE by name."""
    (official / "1/model.py").write_text("# mine\n")
    (official / "vllm_env/bin").mkdir(parents=True)
    (official / "large").write_bytes(b"")
    os.truncate(official / "large", 10_000_001)
    (official / "deep/tokenizer").mkdir(parents=True)
    (official / "deep/tokenizer/x.safetensors").write_text("")
    os.mkfifo(official / "fifo")
    before = names(official)
    adoption = read_adoption(official, target, TEMPLATE, "vllm_env")
    assert '-backend: "vllm"\n+backend: "python"' in adoption.difference
    assert f'+    "model": "{official / "weights"}"' in adoption.difference
    left = {str(path.relative_to(official)) for path in adoption.left}
    assert left == {"weights", "adapters", "linked", "1/model.py", "vllm_env", "large", "deep"}
    assert {path.name for path in adoption.copied} == {"config.pbtxt", "model.json", "multi_lora.json", "notes", "chat.jinja"}
    assert names(official) == before
    assert not target.parents[1].exists()


def test_the_same_arguments_twice_stay_the_same(workspace: Workspace, official: Path, target: Path) -> None:
    """However they are written; the path becomes absolute in both files."""
    (official / "vllm_engine_args.json").write_text(json.dumps(dict(reversed(ARGUMENTS.items())), indent=4))
    adopt(workspace, official, target)
    check_model_folder(target)
    for name in ("vllm_engine_args.json", "1/model.json"):
        assert json.loads((target / name).read_text())["model"] == str(official / "weights")


@pytest.mark.parametrize("absolute", [False, True])
def test_a_version_folder_that_is_the_model_is_read(
    workspace: Workspace,
    official: Path,
    target: Path,
    absolute: bool,
) -> None:
    """Its small files are copied, its weights stay and are named where they are."""
    named = str(official / "1") if absolute else "1"
    (official / "1/model.json").write_text(json.dumps({"model": named}))
    (official / "1/config.json").write_text("{}")
    (official / "1/x.safetensors").write_bytes(b"1")
    before = snapshot(official)
    adopt(workspace, official, target)
    assert snapshot(official) == before
    taken = {"1/model.json", "1/config.json", "1/multi_lora.json", "1/model.py"}
    assert taken <= names(target)
    assert "1/x.safetensors" not in names(target)
    assert json.loads((target / "1/model.json").read_text()) == {"model": str(official / "1")}


@pytest.mark.usefixtures("_way")
def test_a_target_that_came_during_the_build_is_refused(
    workspace: Workspace, official: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build takes minutes, and two may run."""
    staged = stage_template

    def staging(*arguments: object) -> Path:
        target.mkdir(parents=True)
        (target / "config.pbtxt").write_text("")
        return staged(*arguments)

    monkeypatch.setitem(globals(), "stage_template", staging)
    with pytest.raises(VllmEnvError, match="exists, and its manifest"):
        adopt(workspace, official, target)
    assert names(target) == {"config.pbtxt"}
    assert (target / "config.pbtxt").read_text() == ""


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "interrupt"])
def test_a_publish_that_ends_early_changes_nothing(
    workspace: Workspace, official: Path, target: Path, monkeypatch: pytest.MonkeyPatch, again: bool, error: BaseException
) -> None:
    """Neither in SOURCE nor in the target; the next one does it."""
    if again:
        adopt(workspace, official, target)
        (target / "1/model.py").write_text("# old\n")

    def fails(*_: object, **__: object) -> None:
        raise error

    before, stood = snapshot(official), names(target)
    with monkeypatch.context() as patch:
        patch.setattr(publishing, "write_set", fails)
        with pytest.raises((VllmEnvError, KeyboardInterrupt)):
            adopt(workspace, official, target, "two")
    assert snapshot(official) == before
    assert names(target) == stood
    if again:
        assert (target / "1/model.py").read_text() == "# old\n"
    adopt(workspace, official, target, "three")
    assert (target / "vllm_env.tar.gz").read_text() == "three"
    assert snapshot(official) == before


def _new(model: Path) -> None:
    (model / "adapters").mkdir()


def _replaced(model: Path) -> None:
    (model / "other").write_text('{"model": "other"}')
    (model / "other").replace(model / "1" / "model.json")


def _configured(model: Path) -> None:
    (model / "config.pbtxt").unlink()
    (model / "config.pbtxt").write_text(f"{CONFIG}# edited\n")


def _led_elsewhere(model: Path) -> None:
    (model / "data").unlink()
    (model / "data").symlink_to("mine")


@pytest.mark.parametrize("change", [_new, _replaced, _configured, _led_elsewhere, lambda model: (model / "notes").unlink()])
def test_a_change_of_the_target_while_it_is_staged_is_not_lost(
    workspace: Workspace, official: Path, target: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    """What comes, goes or is replaced between the copy and the exchange: nothing is exchanged."""
    adopt(workspace, official, target)
    (target / "data").symlink_to("notes")
    kept: list[dict[str, tuple[object, ...]]] = []

    def changing(_: Path) -> None:
        change(target)
        kept.append(snapshot(target))

    monkeypatch.setattr(publishing, "sync", changing)
    with pytest.raises(VllmEnvError, match=r"was changed while .* was being replaced"):
        adopt(workspace, official, target)
    assert [{k: v[:4] for k, v in state.items()} for state in kept] == [{k: v[:4] for k, v in snapshot(target).items()}]
    assert not list(target.parents[1].rglob(f"{STAGING_PREFIX}*"))
