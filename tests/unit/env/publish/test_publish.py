"""Publishing: one step, the user's files as they were, nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from support.repositories import CHECKOUT
from support.small_fixtures import workspace_in
from vllm_env.base.errors import VllmEnvError
from vllm_env.layout.cached import parts_folder
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.publish import model_folder
from vllm_env.publish import publish as module
from vllm_env.publish.exchange import STAGING_PREFIX
from vllm_env.publish.model_folder import BuiltSet
from vllm_env.publish.publish import check_writable, publish

_TEMPLATE = CHECKOUT / "model_repository" / "vllm"
_WORKSPACE = workspace_in(Path("/nonexistent"))  # publishing takes nothing from the cache but what it is given


@pytest.fixture
def built(tmp_path: Path) -> BuiltSet:
    """A set whose archive, stub and manifest say "one"."""
    return _built(tmp_path / "cache", "one")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Where it goes; beside it lies nothing else."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place" / "models"


def _built(folder: Path, tag: str, layout: str = "archive") -> BuiltSet:
    folder.mkdir(parents=True, exist_ok=True)
    stub, environment = folder / f"stub-{tag}", folder / f"environment-{tag}"
    stub.write_text(tag)
    if layout != "directory":
        environment.write_text(tag)
        environment.chmod(0o600)
    else:
        (environment / "bin").mkdir(parents=True, exist_ok=True)
        (environment / "bin" / "activate").write_text(tag)
    if layout == "parts":
        parts_folder(environment).mkdir()
        (parts_folder(environment) / "000.tar.gz").write_text(tag)
    return BuiltSet(stub, environment, LAYOUTS[layout], json.dumps({"tag": tag}), json.dumps({"sbom": tag}))


def _tags(model: Path) -> set[str]:
    manifest = json.loads((model / "vllm_env.json").read_text())["tag"]
    return {manifest, (model / "vllm_env.tar.gz").read_text(), (model / "triton_python_backend_stub").read_text()}


def _mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


def _no_strays(repository: Path) -> bool:
    return not [p for p in repository.parent.rglob("*") if p.name.startswith(STAGING_PREFIX) or p.name.endswith(".new")]


@pytest.fixture(params=["exchange", "in place"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of placing; a file system that cannot exchange is stood in for by the call's own answer."""
    if request.param == "in place":
        monkeypatch.setattr(module, "exchange", lambda *_: False)
        monkeypatch.setattr(module, "staging_place", lambda _: None)
    return str(request.param)


def test_a_new_repository_gets_the_whole_model(built: BuiltSet, repository: Path, way: str) -> None:
    """The template's files and the set, and no staging beside or inside."""
    model = publish(_WORKSPACE, built, repository, "vllm", _TEMPLATE)
    assert (model / "1/model.py").read_bytes() == (_TEMPLATE / "1/model.py").read_bytes()
    assert _tags(model) == {"one"}
    assert [p.name for p in repository.iterdir()] == ["vllm"]
    assert _no_strays(repository)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_modes_let_the_servers_user_read(built: BuiltSet, repository: Path, way: str, umask: int) -> None:
    """Archive, manifest and SBOM 0644, stub 0755, whatever the umask and the cache's modes are."""
    before = os.umask(umask)
    try:
        model = publish(_WORKSPACE, built, repository, "vllm", _TEMPLATE)
    finally:
        os.umask(before)
    assert _mode(model / "triton_python_backend_stub") == 0o755
    assert {_mode(model / n) for n in ("vllm_env.tar.gz", "vllm_env.json", "vllm_env.cdx.json")} == {0o644}


def test_another_user_can_read_an_unpacked_environment(repository: Path, way: str, tmp_path: Path) -> None:
    """Under umask 077 too, with a checkout and a cache that were made under it; the cache's own files stay private."""
    before = os.umask(0o077)
    try:
        template = shutil.copytree(_TEMPLATE, tmp_path / "template", copy_function=shutil.copyfile)
        template.chmod(0o700)
        built = _built(tmp_path / "cache", "one", "directory")
        (built.environment / "bin/python").write_text("")
        (built.environment / "bin/python").chmod(0o700)
        (built.environment / "bin/link").symlink_to("/nonexistent")
        model = publish(_WORKSPACE, built, repository, "vllm", template)
    finally:
        os.umask(before)
    paths = [p for p in (repository, *repository.rglob("*")) if not p.is_symlink()]
    assert {str(p): _mode(p) for p in paths if _mode(p) & 0o044 != 0o044 or (p.is_dir() and not _mode(p) & 1)} == {}
    assert _mode(model / "vllm_env/bin/python") == 0o755
    assert _mode(built.environment / "bin/activate") == 0o600


def test_the_users_files_stay_as_they_are(built: BuiltSet, repository: Path, way: str, tmp_path: Path) -> None:
    """Edited engine arguments, own files, links and modes survive; what was built is replaced."""
    model = publish(_WORKSPACE, built, repository, "vllm", _TEMPLATE)
    (model / "vllm_engine_args.json").write_text('{"model": "mine"}')
    (model / "1" / "own.py").write_text("mine")
    (model / "1" / "own.py").chmod(0o600)
    (model / "link").symlink_to("1/own.py")
    (model / "vllm_cache").mkdir()
    (model / "vllm_cache" / "warm.json").write_text("mine")
    publish(_WORKSPACE, _built(tmp_path / "cache", "two"), repository, "vllm", _TEMPLATE)
    assert _tags(model) == {"two"}
    assert (model / "vllm_engine_args.json").read_text() == '{"model": "mine"}'
    assert _mode(model / "1/own.py") == 0o600
    assert (model / "link").readlink() == Path("1/own.py")
    assert (model / "vllm_cache/warm.json").read_text() == "mine"
    assert _no_strays(repository)


def test_the_folder_with_the_new_names_is_on_the_disk(
    built: BuiltSet, repository: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end: a loss of power brings back neither the old set nor a part of the new one."""
    synced: list[Path] = []
    monkeypatch.setattr(module, "sync", synced.append)
    publish(_WORKSPACE, built, repository, "m", _TEMPLATE)
    assert synced[-1] == (repository if way == "exchange" else repository / "m")


def test_a_missing_file_of_the_user_is_not_put_back(built: BuiltSet, repository: Path, way: str) -> None:
    """A whole model is the user's: the template does not come back into it, but for the arguments that no load can do without."""
    model = publish(_WORKSPACE, built, repository, "vllm", _TEMPLATE)
    example = (_TEMPLATE / "vllm_engine_args.example.json").read_text()
    for name in ("vllm_engine_args.json", "1/triton_vllm/base/coerce.py"):
        (model / name).unlink()
    publish(_WORKSPACE, built, repository, "vllm", _TEMPLATE)
    assert not (model / "1/triton_vllm/base/coerce.py").exists()
    assert (model / "vllm_engine_args.json").read_text() == example
    (model / "vllm_engine_args.json").unlink()
    (model / "1/model.json").write_text("{}")  # the official backend's place for them
    publish(_WORKSPACE, built, repository, "vllm", _TEMPLATE)
    assert not (model / "vllm_engine_args.json").exists()


def test_a_new_model_does_not_get_the_templates_caches(built: BuiltSet, repository: Path, way: str, tmp_path: Path) -> None:
    """The template is a model that may have been warmed itself, for another environment and other arguments."""
    template = tmp_path / "template"
    shutil.copytree(_TEMPLATE, template, ignore=shutil.ignore_patterns("vllm_cache", "vllm_env*"))
    (template / "vllm_cache").mkdir()
    (template / "vllm_cache" / "warm.json").write_text("the template's")
    assert not (publish(_WORKSPACE, built, repository, "vllm", template) / "vllm_cache").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_set_and_no_trace(
    built: BuiltSet, repository: Path, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A full disk or Ctrl-C while files are staged: what stood there is as it was."""
    model = publish(_WORKSPACE, built, repository, "vllm", _TEMPLATE)
    before = {p: p.stat().st_mtime_ns for p in model.rglob("*") if p.is_file()}

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(model_folder, "sync", fails)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else VllmEnvError) as caught:
        publish(_WORKSPACE, _built(tmp_path / "cache", "two"), repository, "vllm", _TEMPLATE)
    assert _tags(model) == {"one"}
    assert {p: p.stat().st_mtime_ns for p in model.rglob("*") if p.is_file()} == before
    assert _no_strays(repository)
    if isinstance(caught.value, VllmEnvError):
        assert "No space left" in caught.value.what
        assert caught.value.remedy


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("last", ["place_additions", "set_environment_path"])
@pytest.mark.parametrize("there", [None, [], ["mine"]])
def test_a_new_model_that_fails_in_place_is_removed(
    built: BuiltSet,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    last: str,
    there: list[str] | None,
) -> None:
    """With all that was placed, and nothing of the user's; a folder that was there stays."""
    monkeypatch.setattr(module, "staging_place", lambda _: None)
    model = repository / "vllm"
    for folder in [] if there is None else [model, *(model / name for name in there)]:
        folder.mkdir(parents=True)
    real = getattr(module, last)

    def fails(*arguments: object) -> None:
        real(*arguments)
        assert (model / "config.pbtxt").is_file()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, last, fails)
        with pytest.raises((VllmEnvError, KeyboardInterrupt)):
            publish(_WORKSPACE, built, repository, "vllm", _TEMPLATE)
    assert model.exists() is (there is not None)
    assert [path.name for path in model.rglob("*")] == (there or [])
    assert _tags(publish(_WORKSPACE, built, repository, "vllm", _TEMPLATE)) == {"one"}


def test_in_place_the_configuration_comes_after_what_it_needs(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a server that polls. The manifest, which makes the set valid, is last."""
    monkeypatch.setattr(module, "staging_place", lambda _: None)
    model = repository / "vllm"
    then: set[str] = set()
    real = shutil.move

    def moving(source: Path, place: Path) -> None:
        if place.name == "config.pbtxt":
            then.update(str(path.relative_to(model)) for path in model.rglob("*") if path.is_file())
            assert '"$$TRITON_MODEL_DIRECTORY/vllm_env"' in source.read_text()
        real(source, place)

    monkeypatch.setattr(shutil, "move", moving)
    built = _built(tmp_path / "cache", "one", "directory")
    publish(_WORKSPACE, built, repository, "vllm", _TEMPLATE)
    code = {"1/model.py", "1/triton_vllm/engine/engine.py", "vllm_engine_args.json"}
    assert code | {"vllm_env/bin/activate", "triton_python_backend_stub"} <= then
    assert not {"config.pbtxt", "vllm_env.json"} & then
    assert (model / "vllm_env.json").is_file()


def test_a_link_to_the_model_stays_a_link(built: BuiltSet, repository: Path, tmp_path: Path) -> None:
    """A user may keep the model elsewhere and link it into the repository."""
    elsewhere = publish(_WORKSPACE, built, tmp_path / "elsewhere", "vllm", _TEMPLATE)
    repository.mkdir()
    (repository / "vllm").symlink_to(elsewhere)
    publish(_WORKSPACE, _built(tmp_path / "cache", "two"), repository, "vllm", _TEMPLATE)
    assert (repository / "vllm").is_symlink()
    assert _tags(elsewhere) == {"two"}


def test_a_repository_that_is_a_file_is_refused_early(tmp_path: Path) -> None:
    """Before the long work: the path, the reason, the remedy."""
    (tmp_path / "file").touch()
    with pytest.raises(VllmEnvError, match="is not a folder") as caught:
        check_writable(tmp_path / "file" / "models", "vllm")
    assert caught.value.remedy


@pytest.mark.parametrize(("repository", "model"), [("/proc/foo", "vllm"), ("/tmp", 300 * "m")])
def test_a_model_that_could_not_be_made_is_refused_early(repository: str, model: str) -> None:
    """access(2) permits both to root. Nothing is left where it was tried."""
    with pytest.raises(VllmEnvError, match=f"--model-repository {repository} cannot be written: ") as caught:
        check_writable(Path(repository), model)
    assert "Name another folder" in caught.value.remedy


def test_a_set_without_a_stub_leaves_none(way: str, tmp_path: Path, repository: Path) -> None:
    """Triton would take the stub of the set before, which is of another release; the next set's stub comes back."""
    libraries = tmp_path / "stub_lib"
    libraries.mkdir()
    (libraries / "libpython3.11.so.1.0").touch()
    shipped = dataclasses.replace(_built(tmp_path / "cache", "one"), stub_libraries=libraries)
    bare = dataclasses.replace(_built(tmp_path / "cache", "two"), stub=None)
    names = {"triton_python_backend_stub", "stub_lib"}
    for built in (shipped, bare, shipped):
        model = publish(_WORKSPACE, built, repository, "vllm", _TEMPLATE)
        found = {path.name for path in model.iterdir()} & names
        assert found == (names if built is shipped else set())
        assert json.loads((model / "vllm_env.json").read_text()) == json.loads(built.manifest)
    assert _no_strays(repository)


def test_layouts_replace_each_other(way: str, tmp_path: Path, repository: Path) -> None:
    """Nothing of the layout before stays: a small archive beside another build's parts would refuse to start.

    EXECUTION_ENV_PATH follows the layout, and the rest of config.pbtxt stays.
    """
    names = {"archive": {"vllm_env.tar.gz"}, "parts": {"vllm_env.tar.gz", "vllm_env.parts"}, "directory": {"vllm_env"}}
    order = ("parts", "parts", "archive", "directory", "archive", "parts", "directory", "parts")
    for number, layout in enumerate(order):
        model = publish(_WORKSPACE, _built(tmp_path / "cache", str(number), layout), repository, "vllm", _TEMPLATE)
        config = model / "config.pbtxt"
        if number == 0:
            config.write_text(f"{config.read_text()}# mine\n")
        environment = {path.name for path in model.iterdir() if path.name in set.union(*names.values())}
        assert environment == names[layout]
        wanted = "vllm_env" if layout == "directory" else "vllm_env.tar.gz"
        assert f'"$$TRITON_MODEL_DIRECTORY/{wanted}"' in config.read_text()
        assert config.read_text().endswith("# mine\n")
        if layout == "directory":
            assert (model / "vllm_env/bin/activate").read_text() == str(number)
        if layout == "parts":
            part = model / "vllm_env.parts" / "000.tar.gz"
            assert (part.read_text(), _mode(part)) == (str(number), 0o644)
    assert _no_strays(repository)


def _config(model: Path) -> str:
    return (model / "config.pbtxt").read_text()


def test_the_count_is_written_if_it_is_given(built: BuiltSet, repository: Path, way: str) -> None:
    """Into a new model and over a user's file, where nothing else changes; without it the user's stays."""
    model = publish(_WORKSPACE, replace(built, count=3), repository, "vllm", _TEMPLATE)
    assert "\n    count: 3\n" in _config(model)
    (model / "config.pbtxt").write_text(_config(model).replace("count: 3", "count: 5 # mine"))
    publish(_WORKSPACE, built, repository, "vllm", _TEMPLATE)
    mine = _config(model)
    assert "count: 5 # mine" in mine
    publish(_WORKSPACE, replace(built, count=2), repository, "vllm", _TEMPLATE)
    assert _config(model) == mine.replace("count: 5", "count: 2")
