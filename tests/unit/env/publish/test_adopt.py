"""A model's folder of the official backend becomes one of ours, in one step, and what it was again."""

from __future__ import annotations

import json
import shutil
import stat
from typing import TYPE_CHECKING

import pytest

from support.repositories import CHECKOUT
from support.small_fixtures import workspace_in
from vllm_env.base.errors import UsageError, VllmEnvError
from vllm_env.layout import LAYOUTS
from vllm_env.model.files import check_receiver
from vllm_env.publish import adopt as module
from vllm_env.publish import publish as publishing
from vllm_env.publish.adopt import AdoptedSet, read_adoption, undo, undo_difference
from vllm_env.publish.exchange import STAGING
from vllm_env.publish.model_folder import BuiltSet, stage_candidate, stage_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vllm_env.base.workspace import Workspace

TEMPLATE = CHECKOUT / "model_repository" / "vllm"
CONFIG = '# mine\nbackend: "vllm"\ninstance_group [{ count: 1 kind: KIND_MODEL }]\n'
ARGUMENTS = {"model": "weights", "enable_lora": True}


@pytest.fixture(params=["exchange", "in place"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of publishing."""
    if request.param == "in place":
        for place in (publishing, module):
            monkeypatch.setattr(place, "staging_place", lambda _: None)


@pytest.fixture(scope="module", autouse=True)
def _small_template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Four of its files are enough: each publish copies all and waits for the disk."""
    folder = tmp_path_factory.mktemp("template") / "vllm"
    for name in ("config.pbtxt", "1/model.py", "1/triton_vllm/__init__.py", "1/triton_vllm/contract.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(TEMPLATE / name, folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "TEMPLATE", folder)
        yield


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return workspace_in(tmp_path / "cache")


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """As people have it: with weights and adapters of its own, and a link."""
    model = tmp_path / "place" / "models" / "opt"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(CONFIG)
    (model / "config.pbtxt").chmod(0o640)
    (model / "1" / "model.json").write_text(json.dumps(ARGUMENTS))
    (model / "1" / "multi_lora.json").write_text('{"sql": "adapters/sql", "hub": "org/name"}')
    for folder in ("weights", "adapters/sql"):
        (model / folder).mkdir(parents=True)
        (model / folder / "data.bin").write_bytes(b"1")
    (model / "notes").symlink_to("weights/data.bin")
    return model


def built(folder: Path, model: Path, tag: str = "one") -> AdoptedSet:
    """A set whose files say ``tag``, for a folder as it is now."""
    folder.mkdir(parents=True, exist_ok=True)
    stub, environment = folder / f"stub-{tag}", folder / f"environment-{tag}"
    stub.write_text(tag)
    environment.write_text(tag)
    return AdoptedSet(
        stub, environment, LAYOUTS["archive"], f'"{tag}"', "{}", adoption=read_adoption(model, TEMPLATE, "vllm_env.tar.gz")
    )


def adopt(workspace: Workspace, model: Path, tag: str = "one") -> None:
    made = built(model.parents[2] / "made", model, tag)
    publishing.publish(workspace, made, model.parent, model.name, TEMPLATE)


def snapshot(folder: Path) -> dict[str, object]:
    """Every file, link and folder with its content, mode and owner; a file's time as well."""
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        content: object = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        time = status.st_mtime_ns if path.is_file() else 0
        found[str(path.relative_to(folder))] = (content, stat.S_IMODE(status.st_mode), status.st_uid, time)
    return found


@pytest.mark.usefixtures("_way")
def test_there_and_back(workspace: Workspace, official: Path) -> None:
    """All of ours is there, no second file of arguments; the user's files are as they were; back again nothing is left."""
    before = snapshot(official)
    adopt(workspace, official)
    after = snapshot(official)
    assert {
        "triton_python_backend_stub",
        "vllm_env.tar.gz",
        "vllm_env.json",
        "1/model.py",
        "1/triton_vllm/contract.py",
    } <= after.keys()
    assert "vllm_engine_args.json" not in after
    assert {name: after[name] for name in before if name != "config.pbtxt"} == {
        n: v for n, v in before.items() if n != "config.pbtxt"
    }
    assert stat.S_IMODE((official / "config.pbtxt").stat().st_mode) == 0o640
    assert (official / ".before_vllm_env" / "config.pbtxt").read_text() == CONFIG
    assert [p.name for p in official.parents[1].iterdir()] == ["models"]
    undo(workspace, official)
    assert snapshot(official) == before
    assert not list(official.parents[1].rglob(f"{STAGING}*"))


@pytest.mark.usefixtures("_way")
def test_again_it_refreshes_and_keeps_the_first_backup(workspace: Workspace, official: Path) -> None:
    """Another environment, and code of ours that has changed; going back leads to the official model all the same."""
    before = snapshot(official)
    adopt(workspace, official)
    assert read_adoption(official, TEMPLATE, "vllm_env.tar.gz").diff == ""
    code = official / "1" / "triton_vllm"
    (code / "contract.py").write_text("# old\n")
    (code / "gone.py").write_text("# old\n")
    difference = read_adoption(official, TEMPLATE, "vllm_env.tar.gz").diff
    assert "-# old" in difference
    assert "1/triton_vllm/gone.py" in difference
    adopt(workspace, official, "two")
    assert (official / "vllm_env.tar.gz").read_text() == "two"
    assert (code / "contract.py").read_bytes() == (TEMPLATE / "1/triton_vllm/contract.py").read_bytes()
    assert not (code / "gone.py").exists()
    (official / "vllm_cache").mkdir()  # as --warm leaves it
    undo(workspace, official)
    assert snapshot(official) == before


@pytest.mark.usefixtures("_way")
def test_what_had_our_names_comes_back(workspace: Workspace, official: Path) -> None:
    """A model.py and an unpacked environment of the user's own are shown, kept, and put back."""
    (official / "1" / "model.py").write_text("# mine\n")
    (official / "vllm_env" / "bin").mkdir(parents=True)
    (official / "vllm_env" / "bin" / "activate").write_text("# mine\n")
    before = snapshot(official)
    assert "-# mine" in read_adoption(official, TEMPLATE, "vllm_env.tar.gz").diff
    adopt(workspace, official)
    assert not (official / "vllm_env").exists()
    undo(workspace, official)
    assert snapshot(official) == before


@pytest.mark.usefixtures("_way")
def test_edits_since_stay(workspace: Workspace, official: Path) -> None:
    """What was changed in the arguments meanwhile is the user's; a configuration restored by hand makes a new backup."""
    adopt(workspace, official)
    (official / "1" / "model.json").write_text('{"model": "other"}')
    undo(workspace, official)
    assert (official / "1" / "model.json").read_text() == '{"model": "other"}'
    adopt(workspace, official)
    edited = f"{CONFIG}# edited\n"
    (official / "config.pbtxt").write_text(edited)
    adopt(workspace, official)
    undo(workspace, official)
    assert (official / "config.pbtxt").read_text() == edited


@pytest.mark.usefixtures("_way")
def test_a_link_out_of_the_folder_harms_nothing(workspace: Workspace, official: Path) -> None:
    """It leads nowhere from the staged folder; the user's code is not written over, and the link comes back."""
    (official.parent / "shared").mkdir()
    (official / "config.pbtxt").rename(official.parent / "shared" / "config.pbtxt")
    (official / "config.pbtxt").symlink_to("../shared/config.pbtxt")
    (official / "1" / "model.py").write_text("# mine\n")
    before = snapshot(official.parent)
    made = built(official.parents[2] / "made", official)
    plain = BuiltSet(made.stub, made.environment, LAYOUTS["archive"], "{}", "{}")
    stage_model(plain, official, TEMPLATE, official.parents[1] / "staged" / "opt")
    shutil.rmtree(official.parents[1] / "staged")
    assert snapshot(official.parent) == before
    adopt(workspace, official)
    assert (official.parent / "shared" / "config.pbtxt").read_text() == CONFIG
    undo(workspace, official)
    assert snapshot(official.parent) == before


@pytest.mark.usefixtures("_way")
def test_the_first_backup_stays_under_a_restored_configuration(workspace: Workspace, official: Path) -> None:
    """Edited by hand, it replaces the one in the backup; the user's code is there still."""
    (official / "1" / "model.py").write_text("# mine\n")
    adopt(workspace, official)
    (official / "config.pbtxt").write_text(f"{CONFIG}# edited\n")
    adopt(workspace, official)
    undo(workspace, official)
    assert (official / "config.pbtxt").read_text() == f"{CONFIG}# edited\n"
    assert (official / "1" / "model.py").read_text() == "# mine\n"


@pytest.mark.usefixtures("_way")
def test_a_link_within_the_folder_comes_back(workspace: Workspace, official: Path) -> None:
    """From the backup, one folder deeper, it leads nowhere."""
    (official / "cfg").mkdir()
    (official / "config.pbtxt").rename(official / "cfg" / "config.pbtxt")
    (official / "config.pbtxt").symlink_to("cfg/config.pbtxt")
    before = snapshot(official)
    adopt(workspace, official)
    adopt(workspace, official, "two")
    assert '+backend: "vllm"' in undo_difference(official, TEMPLATE)
    undo(workspace, official)
    assert snapshot(official) == before


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("content", [None, b"\xff"])
def test_the_way_back_needs_no_configuration(workspace: Workspace, official: Path, content: bytes | None) -> None:
    """It may be gone, or no text."""
    before = snapshot(official)
    adopt(workspace, official)
    (official / "config.pbtxt").unlink() if content is None else (official / "config.pbtxt").write_bytes(content)
    undo(workspace, official)
    assert snapshot(official) == before


@pytest.mark.usefixtures("_way")
def test_the_backup_is_no_hard_link(official: Path) -> None:
    """An edit in place before the switch does not reach it."""
    (official / "1" / "model.py").write_text("# mine\n")
    made, new = built(official.parents[2] / "made", official), official.parents[1] / "new"
    stage_model(made, official, TEMPLATE, new)
    for name in ("config.pbtxt", "1/model.py"):
        assert not (new / ".before_vllm_env" / name).samefile(official / name)


def test_a_full_disk_in_place_leaves_nothing(workspace: Workspace, official: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gigabytes are written before code and backup are placed."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publishing, "staging_place", lambda _: None)
    monkeypatch.setattr(publishing, "write_set", full)
    before = snapshot(official)
    with pytest.raises(VllmEnvError, match="cannot be written"):
        adopt(workspace, official)
    assert snapshot(official) == before


def test_a_model_that_was_built_is_not_adopted(workspace: Workspace, official: Path) -> None:
    """Its environment would be kept for ever; a plain build takes it."""
    adopt(workspace, official)
    shutil.rmtree(official / ".before_vllm_env")
    with pytest.raises(VllmEnvError, match="was not adopted") as caught:
        read_adoption(official, TEMPLATE, "vllm_env")
    assert f"--model-repository {official.parent} --model opt" in caught.value.remedy


def test_a_change_during_the_build_is_not_lost(workspace: Workspace, official: Path) -> None:
    """The configuration was read before the build, which takes minutes."""
    made = built(official.parents[2] / "made", official)
    (official / "config.pbtxt").write_text(f"{CONFIG}# changed\n")
    before = snapshot(official)
    with pytest.raises(VllmEnvError, match="was changed while"):
        publishing.publish(workspace, made, official.parent, official.name, TEMPLATE)
    assert snapshot(official) == before


def _new(model: Path) -> None:
    (model / "adapters" / "new").mkdir()


def _replaced(model: Path) -> None:
    (model / "other").write_text('{"model": "other"}')
    (model / "other").replace(model / "1" / "model.json")


def _configured(model: Path) -> None:
    (model / "config.pbtxt").write_text(f"{CONFIG}# edited\n")


def _led_elsewhere(model: Path) -> None:
    (model / "data").unlink()
    (model / "data").symlink_to("adapters/sql")


@pytest.mark.parametrize("change", [_new, _replaced, _configured, _led_elsewhere, lambda model: (model / "notes").unlink()])
@pytest.mark.parametrize("back", [False, True])
def test_a_change_while_it_is_staged_is_not_lost(
    workspace: Workspace, official: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], back: bool
) -> None:
    """What comes, goes or is replaced between the copy and the exchange: nothing is exchanged."""
    (official / "data").symlink_to("weights")
    if back:
        adopt(workspace, official)
    kept: list[object] = []

    def changing(_: Path) -> None:
        change(official)
        kept.append(snapshot(official))

    monkeypatch.setattr(module if back else publishing, "sync", changing)
    with pytest.raises(VllmEnvError, match=r"was changed while .* was being replaced"):
        undo(workspace, official) if back else adopt(workspace, official)
    assert kept == [snapshot(official)]
    assert not list(official.parents[1].rglob(f"{STAGING}*"))


def test_what_is_written_into_a_file_meanwhile_is_there_afterwards(
    workspace: Workspace, official: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log, say, or the engine arguments: the new folder has a hard link of them."""
    monkeypatch.setattr(publishing, "sync", lambda _: (official / "1" / "model.json").write_text('{"model": "other"}'))
    adopt(workspace, official)
    assert (official / "1" / "model.json").read_text() == '{"model": "other"}'


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("earlier", ["", "# older\n"])
def test_code_beside_a_restored_configuration_is_kept(workspace: Workspace, official: Path, earlier: str) -> None:
    """Whoever goes back by hand may write a model.py before the next adopt, and gets that one back."""
    if earlier:
        (official / "1" / "model.py").write_text(earlier)
    adopt(workspace, official)
    (official / "config.pbtxt").write_text(CONFIG)
    adopt(workspace, official, "two")
    undo(workspace, official)
    assert (official / "1" / "model.py").exists() is bool(earlier)
    adopt(workspace, official)
    (official / "config.pbtxt").write_text(CONFIG)
    (official / "1" / "model.py").write_text("# mine\n")
    adopt(workspace, official, "two")
    undo(workspace, official)
    assert (official / "1" / "model.py").read_text() == "# mine\n"
    assert (official / "config.pbtxt").read_text() == CONFIG


def test_the_way_back_tells_what_goes(workspace: Workspace, official: Path) -> None:
    """A file that someone has put among the model's code."""
    adopt(workspace, official)
    assert "goes:" not in undo_difference(official, TEMPLATE)
    (official / "1" / "triton_vllm" / "hooks.py").write_text("# mine\n")
    assert undo_difference(official, TEMPLATE).endswith("goes: 1/triton_vllm/hooks.py\n")


def test_no_way_back_to_a_link_that_leads_nowhere(workspace: Workspace, official: Path) -> None:
    """The model would be left without a configuration; with the file in its place again there is one."""
    shared = official.parent / "shared.pbtxt"
    (official / "config.pbtxt").rename(shared)
    (official / "config.pbtxt").symlink_to("../shared.pbtxt")
    before = snapshot(official)
    adopt(workspace, official)
    adopted = snapshot(official)
    shared.rename(official.parent / "elsewhere")
    with pytest.raises(VllmEnvError, match="which is no file") as caught:
        undo(workspace, official)
    assert "Put that file back" in (caught.value.remedy or "")
    assert snapshot(official) == adopted
    (official.parent / "elsewhere").rename(shared)
    undo(workspace, official)
    assert snapshot(official) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / "1/model.json").write_text(json.dumps({"model": "a" * 5000, "tokenizer": "b\0"})),
        lambda model: (
            (model / "1/model.json").write_text('{"model": "weights"}'),
            (model / "1/multi_lora.json").write_text("broken"),
        ),
        lambda model: (model / "01").mkdir(),
    ],
    ids=["no path", "adapters that nobody reads", "a folder that Triton passes over"],
)
def test_what_harms_nothing_is_no_reason_to_refuse(official: Path, change: Callable[[Path], object]) -> None:
    """The official backend serves such a model as well, or its server passes over it."""
    change(official)
    assert '+backend: "python"' in read_adoption(official, TEMPLATE, "vllm_env").diff


def test_what_is_served_first_is_what_will_stand(workspace: Workspace, official: Path, tmp_path: Path) -> None:
    """The candidate of the smoke run has the code, the configuration and the adopted model's own arguments."""
    stage_candidate(built(tmp_path / "made", official), official, TEMPLATE, tmp_path / "new")
    assert 'backend: "python"' in (tmp_path / "new" / "config.pbtxt").read_text()
    assert {"model.json", "multi_lora.json", "model.py", "triton_vllm"} == {p.name for p in (tmp_path / "new" / "1").iterdir()}
    assert (official / "config.pbtxt").read_text() == CONFIG
    own = read_adoption(official, TEMPLATE, "vllm_env").own
    assert own["1/model.json"] == {**ARGUMENTS, "model": str(official / "weights")}
    assert own["1/multi_lora.json"] == {"sql": str(official / "adapters/sql"), "hub": "org/name"}


def _config(text: str) -> Callable[[Path], object]:
    return lambda model: (model / "config.pbtxt").write_text(text)


def _arguments(text: str) -> Callable[[Path], object]:
    return lambda model: (model / "1/model.json").write_text(text)


def _elsewhere(model: Path) -> None:
    (model / "1").rename(model.parents[1] / "elsewhere")
    (model / "1").symlink_to(model.parents[1] / "elsewhere")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: (model / "config.pbtxt").unlink(), r"config.pbtxt is missing"),
        (lambda model: (model / "config.pbtxt").write_bytes(b"\xff"), "config.pbtxt cannot be read"),
        (_config('backend: "tensorrtllm"'), 'names the backend "tensorrtllm"'),
        (_config('backend: "python"'), 'names the backend "python"'),
        (_config(""), 'names the backend ""'),
        (_config("{"), "is no model configuration"),
        (lambda model: (model / "3").mkdir(), "has the versions 1, 3"),
        (lambda model: (model / "1").rename(model / "2"), "has the versions 2,"),
        (lambda model: shutil.rmtree(model / "1"), "has no version"),
        (_elsewhere, "is a link"),
        (lambda model: (model / "1/model.json").unlink(), "model.json is missing"),
        (_arguments("[1]"), "holds a JSON list"),
        (_arguments("{"), "is not JSON"),
        (_arguments("[" * 100_000), "is not JSON"),
        (lambda model: (model / "vllm_engine_args.json").write_text("[" * 100_000), "vllm_engine_args.json is not JSON"),
        (lambda model: (model / ".before_vllm_env").mkdir(), r"\.before_vllm_env is there and holds no config.pbtxt"),
        (lambda model: (model / "1/multi_lora.json").write_text("1"), "multi_lora.json holds a JSON int"),
        (lambda model: (model / "vllm_engine_args.json").write_text('{"model": "x"}'), "differ: enable_lora, model"),
    ],
)
def test_what_is_no_model_to_adopt_is_refused(official: Path, change: Callable[[Path], object], said: str) -> None:
    """By name, with a remedy, and nothing is written."""
    change(official)
    before = snapshot(official)
    with pytest.raises(VllmEnvError, match=said) as caught:
        read_adoption(official, TEMPLATE, "vllm_env")
    assert caught.value.remedy
    assert snapshot(official) == before


def test_what_is_not_there_is_refused(official: Path, tmp_path: Path, workspace: Workspace) -> None:
    """A folder that does not exist, a file, and a way back from nowhere."""
    for path in (tmp_path / "none", official / "config.pbtxt"):
        with pytest.raises(UsageError, match="is not a folder"):
            read_adoption(path, TEMPLATE, "vllm_env")
    with pytest.raises(UsageError, match="is not a folder"):
        undo(workspace, tmp_path / "none")
    with pytest.raises(VllmEnvError, match=r"holds no \.before_vllm_env"):
        undo(workspace, official)


def test_the_same_arguments_twice_are_fine(workspace: Workspace, official: Path) -> None:
    """However they are written."""
    (official / "vllm_engine_args.json").write_text(json.dumps(dict(reversed(ARGUMENTS.items())), indent=4))
    adopt(workspace, official)
    check_receiver(official)
    assert undo_difference(official, TEMPLATE).count("\n-") > 10


def test_a_build_does_not_publish_beside_another_backends_configuration(official: Path) -> None:
    """It would not be served; the refusal names what takes the model over. Two files that differ are refused as well."""
    with pytest.raises(VllmEnvError, match='names the backend "vllm"') as caught:
        check_receiver(official)
    assert f"./gen_vllm_env.sh adopt {official}" in caught.value.remedy
    (official / "config.pbtxt").write_text('backend: "python" # not "vllm"')
    check_receiver(official)
    (official / "vllm_engine_args.json").write_text("{}")
    with pytest.raises(VllmEnvError, match=r"vllm_engine_args.json and .*1/model.json differ: enable_lora, model"):
        check_receiver(official)
