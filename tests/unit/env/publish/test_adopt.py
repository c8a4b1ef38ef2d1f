"""A model folder of the official backend becomes a model of ours in another place, and stays what it was."""

from __future__ import annotations

import json
import os
import shutil
import stat
from typing import TYPE_CHECKING

import pytest

from support.repositories import CHECKOUT
from support.small_fixtures import workspace_in
from vllm_env.base.errors import UsageError, VllmEnvError
from vllm_env.cli.main import main
from vllm_env.layout import LAYOUTS
from vllm_env.model.files import check_model_folder
from vllm_env.publish import publish as publishing
from vllm_env.publish.adopt import read_adoption, refuse_target, stage_template
from vllm_env.publish.exchange import STAGING
from vllm_env.publish.model_folder import BuiltSet, set_environment_path, stage_candidate, write_set

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
        monkeypatch.setattr(publishing, "staging_place", lambda _: None)


@pytest.fixture(scope="module", autouse=True)
def _small_template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Four of its files are enough: each publish copies all and waits for the disk."""
    folder = tmp_path_factory.mktemp("template") / "vllm"
    for name in ("config.pbtxt", "1/model.py", "1/triton_vllm/__init__.py", "1/triton_vllm/request/contract.py"):
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
    """As people have it: with weights and adapters of its own, and links."""
    model = tmp_path / "theirs" / "opt"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(CONFIG)
    (model / "config.pbtxt").chmod(0o640)
    (model / "1" / "model.json").write_text(json.dumps(ARGUMENTS))
    (model / "1" / "model.json").chmod(0o600)
    (model / "1" / "multi_lora.json").write_text('{"sql": "adapters/sql", "hub": "org/name"}')
    for folder in ("weights", "adapters/sql"):
        (model / folder).mkdir(parents=True)
        (model / folder / "data.bin").write_bytes(b"1")
    (model / "notes").symlink_to("chat.jinja")
    (model / "chat.jinja").write_text("{{ messages }}")
    (model / "linked").symlink_to("weights")
    return model


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where the new model will be."""
    return tmp_path / "place" / "models" / "opt"


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


def manifest(source: Path) -> str:
    """A manifest that says where the model is from."""
    record = {"name": "n", "sha256": "", "size": 0}
    vllm = {"version": "1", "commit": "", "distribution": "vllm", "origin": "o"}
    texts = {"layout": "archive", **dict.fromkeys(("key", "python", "triton_release", "lock_digest", "built_at"), "x")}
    stub = {**record, "python": "3.11", "release": "24.10", "origin": "o"}
    parts = {"vllm": vllm, "versions": {}, "archive": record, "stub": stub, "spec": {}, "left_out": []}
    return json.dumps({**texts, **parts, "format": 1, "adopted_from": str(source)})


def snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """The folder and all in it: kind, content, mode, owner, time of change, and how many names a file has."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        content: object = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        links = status.st_nlink if path.is_file() else 0
        mode = stat.S_IMODE(status.st_mode)
        found[str(path.relative_to(folder))] = (content, mode, status.st_uid, status.st_mtime_ns, links)
    return found


def names(folder: Path) -> set[str]:
    """Its files and links, from it on."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}


@pytest.mark.usefixtures("_way")
def test_it_becomes_a_model_of_ours(workspace: Workspace, official: Path, target: Path) -> None:
    """Small files are copied with their modes; weights, adapters and linked folders are named where they are."""
    before = snapshot(official)
    adopt(workspace, official, target)
    assert snapshot(official) == before
    built = {"triton_python_backend_stub", "vllm_env.tar.gz", "vllm_env.json", "vllm_env.cdx.json"}
    code = {"1/model.py", "1/triton_vllm/__init__.py", "1/triton_vllm/request/contract.py"}
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
    assert not list(target.parents[1].rglob(f"{STAGING}*"))


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


@pytest.mark.usefixtures("_way")
def test_a_second_file_of_engine_arguments_is_not_missing(
    workspace: Workspace,
    official: Path,
    target: Path,
) -> None:
    """The user has removed it and edited the other one: they would differ. Adapters come back."""
    (official / "vllm_engine_args.json").write_text(json.dumps(ARGUMENTS))
    adopt(workspace, official, target)
    edited = {"model": "other", "enable_lora": True}
    (target / "1/model.json").write_text(json.dumps(edited))
    for name in ("vllm_engine_args.json", "config.pbtxt", "1/multi_lora.json"):
        (target / name).unlink()
    adapters = {"sql": str(official / "adapters/sql"), "hub": "org/name"}
    own = read_adoption(official, target, TEMPLATE, "vllm_env.tar.gz").own
    assert own == {"1/model.json": edited, "1/multi_lora.json": adapters}
    adopt(workspace, official, target)
    assert not (target / "vllm_engine_args.json").exists()
    assert json.loads((target / "1/multi_lora.json").read_text()) == adapters


def test_a_plain_build_keeps_the_code(workspace: Workspace, official: Path, target: Path) -> None:
    """It takes an adopted model as its own: what the user has edited in the code stays."""
    adopt(workspace, official, target)
    (target / "1/model.py").write_text("# edited\n")
    made = workspace.cache.root / "made"
    built = BuiltSet(made / "stub-one", made / "environment-one", LAYOUTS["archive"], manifest(official), "{}")
    publishing.publish(workspace, built, target.parent, target.name, TEMPLATE)
    assert (target / "1/model.py").read_text() == "# edited\n"


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


def test_arguments_without_a_path_of_the_folder_are_copied_as_they_are(
    workspace: Workspace, official: Path, target: Path
) -> None:
    """The official tutorial's file names a model on the hub."""
    text = '{\n    "model":"facebook/opt-125m",\n    "disable_log_requests": true,\n    "gpu_memory_utilization": 0.5\n}\n'
    (official / "1/model.json").write_text(text)
    adopt(workspace, official, target)
    assert (target / "1/model.json").read_text() == text
    assert (target / "1/multi_lora.json").read_bytes() == (official / "1/multi_lora.json").read_bytes()


def test_the_same_arguments_twice_stay_the_same(workspace: Workspace, official: Path, target: Path) -> None:
    """However they are written; the path becomes absolute in both files."""
    (official / "vllm_engine_args.json").write_text(json.dumps(dict(reversed(ARGUMENTS.items())), indent=4))
    adopt(workspace, official, target)
    check_model_folder(target)
    for name in ("vllm_engine_args.json", "1/model.json"):
        assert json.loads((target / name).read_text())["model"] == str(official / "weights")


def test_a_version_folder_that_is_a_link_is_read(workspace: Workspace, official: Path, target: Path) -> None:
    """The new one is a folder."""
    (official / "1").rename(official.parent / "elsewhere")
    (official / "1").symlink_to("../elsewhere")
    before = snapshot(official.parent)
    adopt(workspace, official, target)
    assert snapshot(official.parent) == before
    assert not (target / "1").is_symlink()
    assert (target / "1/model.json").is_file()


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


def test_what_is_served_first_is_what_will_stand(official: Path, target: Path, tmp_path: Path, workspace: Workspace) -> None:
    """The candidate of the smoke run has the code, the configuration and the adopted model's own arguments."""

    def candidate(folder: Path) -> Path:
        adoption = read_adoption(official, target, TEMPLATE, "vllm_env.tar.gz")
        template = stage_template(adoption, TEMPLATE, folder / "template")
        made = workspace.cache.root / "made"
        built = BuiltSet(made / "stub-one", made / "environment-one", LAYOUTS["archive"], "{}", "{}", adopted_from=official)
        stage_candidate(built, target, template, folder / "new")
        return folder / "new"

    made = workspace.cache.root / "made"
    made.mkdir(parents=True)
    for name in ("stub-one", "environment-one"):
        (made / name).write_text("one")
    new = candidate(tmp_path / "first")
    assert 'backend: "python"' in (new / "config.pbtxt").read_text()
    assert {"model.json", "multi_lora.json", "model.py", "triton_vllm"} == {p.name for p in (new / "1").iterdir()}
    adopt(workspace, official, target)
    (target / "1/triton_vllm/request/contract.py").write_text("# old\n")
    (target / "1/model.json").write_text('{"model": "other"}')
    new = candidate(tmp_path / "second")
    assert (new / "1/triton_vllm/request/contract.py").read_bytes() == (
        TEMPLATE / "1/triton_vllm/request/contract.py"
    ).read_bytes()
    assert (new / "1/model.json").read_text() == '{"model": "other"}'
    (target / "config.pbtxt").unlink()
    (target / "1/multi_lora.json").unlink()
    new = candidate(tmp_path / "third")
    assert 'backend: "python"' in (new / "config.pbtxt").read_text()
    assert (new / "1/model.json").read_text() == '{"model": "other"}'
    assert (new / "1/multi_lora.json").is_file()
    assert (new / "1/triton_vllm/request/contract.py").read_text() != "# old\n"


def _config(text: str) -> Callable[[Path], object]:
    return lambda model: (model / "config.pbtxt").write_text(text)


def _arguments(text: str) -> Callable[[Path], object]:
    return lambda model: (model / "1/model.json").write_text(text)


def _ours(model: Path) -> None:
    (model / "1/triton_vllm").mkdir()
    place = "$$TRITON_MODEL_DIRECTORY/vllm_env"
    parameter = f'parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{place}" }} }}'
    (model / "config.pbtxt").write_text(f'backend: "python"\n{parameter}')


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: (model / "config.pbtxt").unlink(), r"config.pbtxt is missing"),
        (lambda model: (model / "config.pbtxt").write_bytes(b"\xff"), "config.pbtxt cannot be read"),
        (lambda model: (model / "config.pbtxt").write_bytes(b'\nname: "\xe9"'), "line 2 has a string that is not UTF-8"),
        (_config('backend: "tensorrtllm"'), 'names the backend "tensorrtllm"'),
        (_config('backend: "python"'), 'names the backend "python"'),
        (_config(""), 'names the backend ""'),
        (_config("{"), "as a model configuration"),
        (_ours, "is a model of this project already"),
        (lambda model: (model / "3").mkdir(), "has the versions 1, 3"),
        (lambda model: (model / "1").rename(model / "2"), "has the versions 2,"),
        (lambda model: shutil.rmtree(model / "1"), "has no version"),
        (lambda model: (model / "1/model.json").unlink(), "model.json is missing"),
        (_arguments("[1]"), "holds a JSON list"),
        (_arguments("{"), "is not JSON"),
        (_arguments("[" * 100_000), "is not JSON"),
        (lambda model: (model / "vllm_engine_args.json").write_text("[" * 100_000), "vllm_engine_args.json is not JSON"),
        (lambda model: (model / "1/multi_lora.json").write_text("1"), "multi_lora.json holds a JSON int"),
        (lambda model: (model / "vllm_engine_args.json").write_text('{"model": "x"}'), "differ: enable_lora, model"),
    ],
)
def test_what_is_no_model_to_adopt_is_refused(official: Path, target: Path, change: Callable[[Path], object], said: str) -> None:
    """By name, with a remedy, and nothing is written."""
    change(official)
    before = snapshot(official.parents[1])
    with pytest.raises(VllmEnvError, match=said) as caught:
        read_adoption(official, target, TEMPLATE, "vllm_env")
    assert caught.value.remedy
    assert snapshot(official.parents[1]) == before


@pytest.mark.parametrize(
    "change",
    [
        _arguments(json.dumps({"model": "a" * 5000, "tokenizer": "b\0"})),
        lambda model: (
            (model / "1/model.json").write_text('{"model": "weights"}'),
            (model / "1/multi_lora.json").write_text("broken"),
        ),
        lambda model: (model / "01").mkdir(),
        lambda model: (model / "loop").symlink_to("loop"),
        lambda model: (model / "1/self").symlink_to(".."),
    ],
    ids=["no path", "adapters that nobody reads", "a folder that Triton ignores", "a loop", "a link upwards"],
)
def test_what_harms_nothing_is_no_reason_to_refuse(
    workspace: Workspace, official: Path, target: Path, change: Callable[[Path], object]
) -> None:
    """The official backend serves such a model as well, or its server ignores it."""
    change(official)
    adopt(workspace, official, target)
    assert 'backend: "python"' in (target / "config.pbtxt").read_text()


def test_a_file_that_cannot_be_copied_is_named(
    workspace: Workspace, official: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions say nothing to root, so the copy itself fails here."""

    def fails(source: Path, _: Path) -> None:
        raise PermissionError(13, "Permission denied", str(source))

    before = snapshot(official)
    monkeypatch.setattr(shutil, "copy2", fails)
    with pytest.raises(VllmEnvError, match=r"opt cannot be copied: Permission denied \(.*chat.jinja") as caught:
        adopt(workspace, official, target)
    assert caught.value.remedy
    assert snapshot(official) == before
    assert not target.exists()


def test_what_is_not_there_is_refused(official: Path, target: Path, tmp_path: Path) -> None:
    """A folder that does not exist, and a file."""
    for path in (tmp_path / "none", official / "config.pbtxt"):
        with pytest.raises(UsageError, match="is not a folder"):
            read_adoption(path, target, TEMPLATE, "vllm_env")


@pytest.mark.parametrize("place", [".", "inside", "inside/deeper", "..", "../..", "link", "linked/inside"])
def test_a_target_that_is_source_or_around_it_is_refused(official: Path, place: str) -> None:
    """Also by a link, and if the target does not exist yet."""
    (official.parent / "link").symlink_to(official)
    target = official.parent / "link" if place == "link" else official / place
    before = snapshot(official.parents[1])
    with pytest.raises(VllmEnvError, match="one lies inside the other") as caught:
        read_adoption(official, target, TEMPLATE, "vllm_env")
    assert "--model-repository" in (caught.value.remedy or "")
    assert snapshot(official.parents[1]) == before


def _foreign(target: Path) -> None:
    target.mkdir(parents=True)
    (target / "config.pbtxt").write_text("")


def _of_another(target: Path) -> None:
    _foreign(target)
    (target / "vllm_env.json").write_text(manifest(target.parent / "another"))


def _built(target: Path) -> None:
    _of_another(target)
    document = json.loads((target / "vllm_env.json").read_text())
    del document["adopted_from"]
    (target / "vllm_env.json").write_text(json.dumps(document))


def _file(target: Path) -> None:
    target.parent.mkdir(parents=True)
    target.write_text("")


def _dangling(target: Path) -> None:
    target.parent.mkdir(parents=True)
    target.symlink_to("nowhere")


@pytest.mark.parametrize("change", [_foreign, _of_another, _built, _file, _dangling])
def test_a_target_that_was_not_adopted_from_source_is_refused(
    official: Path, target: Path, change: Callable[[Path], object]
) -> None:
    """Whatever it is: nobody knows whose files they are."""
    change(target)
    before = snapshot(official.parents[1])
    with pytest.raises(VllmEnvError, match=f"{target} exists, and its manifest does not say .* from {official}") as caught:
        read_adoption(official, target, TEMPLATE, "vllm_env")
    assert "--model" in (caught.value.remedy or "")
    assert snapshot(official.parents[1]) == before


@pytest.mark.parametrize("link", [False, True])
def test_the_template_is_no_target(official: Path, tmp_path: Path, link: bool) -> None:
    """Also by a link. Nobody is told to remove it."""
    template = tmp_path / "models" / "vllm"
    shutil.copytree(TEMPLATE, template)
    target = tmp_path / "link" if link else template
    if link:
        target.symlink_to(template)
    with pytest.raises(VllmEnvError, match="is this project's own model") as caught:
        read_adoption(official, target, template, "vllm_env")
    assert "--model NEW" in (caught.value.remedy or "")
    assert "emove" not in str(caught.value.remedy)


def test_a_folder_named_as_the_template_needs_a_name(official: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a checkout the command would write the new model there."""
    source = official.rename(official.with_name("vllm"))
    assert main(["adopt", str(source), "--dry-run"]) == 1
    said = capsys.readouterr().err
    assert "--model NEW" in said
    assert "Or remove it" not in said


def test_an_empty_target_is_free(workspace: Workspace, official: Path, target: Path) -> None:
    """A build that was killed while it published in place may leave one, with what it staged."""
    (target / f"{STAGING}abcd1234" / "vllm_env").mkdir(parents=True)
    adopt(workspace, official, target)
    assert (target / "vllm_env.json").is_file()


def test_a_target_whose_code_is_in_source_is_refused(workspace: Workspace, official: Path, target: Path) -> None:
    """Its code would be replaced where the link leads."""
    adopt(workspace, official, target)
    shutil.rmtree(target / "1")
    (target / "1").symlink_to(official / "1")
    before = snapshot(official.parents[1])
    with pytest.raises(VllmEnvError, match="1 is a link or a mount point"):
        refuse_target(official, target)
    assert snapshot(official.parents[1]) == before


@pytest.mark.usefixtures("_way")
def test_a_target_that_came_during_the_build_is_refused(
    workspace: Workspace, official: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build takes minutes, and two may run."""
    staged = stage_template

    def staging(*arguments: object) -> Path:
        _foreign(target)
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


@pytest.mark.usefixtures("_way")
def test_code_that_cannot_be_staged_changes_nothing(
    workspace: Workspace,
    official: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk that is full by then: what was adopted before is as it was."""
    adopt(workspace, official, target)
    (target / "1/model.py").write_text("# old\n")
    before = {name: (target / name).read_bytes() for name in names(target)}
    real = write_set

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def filling(*arguments: object) -> None:
        real(*arguments)
        monkeypatch.setattr(shutil, "copytree", full)

    monkeypatch.setattr(publishing, "write_set", filling)
    with pytest.raises(VllmEnvError, match="No space left"):
        adopt(workspace, official, target, "two")
    assert {name: (target / name).read_bytes() for name in names(target)} == before


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
    assert not list(target.parents[1].rglob(f"{STAGING}*"))


def test_a_build_does_not_publish_beside_another_backends_configuration(official: Path) -> None:
    """It would not be served; the refusal names what adopts the model. Two files that differ are refused as well."""
    with pytest.raises(VllmEnvError, match='names the backend "vllm"') as caught:
        check_model_folder(official)
    assert f"./gen_vllm_env.sh adopt {official}" in caught.value.remedy
    (official / "config.pbtxt").write_text('backend: "python" # not "vllm"')
    check_model_folder(official)
    (official / "vllm_engine_args.json").write_text("{}")
    with pytest.raises(VllmEnvError, match=r"vllm_engine_args.json and .*1/model.json differ: enable_lora, model"):
        check_model_folder(official)
