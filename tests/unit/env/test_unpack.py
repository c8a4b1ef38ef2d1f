"""``unpack``: the same whole environment from every layout, in an empty folder, or nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support import small_model
from support.small_model import SITE
from vllm_env import unpack as unpack_module
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.locks import locked_folder
from vllm_env.cli.main import main
from vllm_env.inside import parts_unpack
from vllm_env.layout.layouts import LAYOUTS

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def prefix(bare_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix with the start-up hook, a few packages, a NumPy and a program."""
    return small_model.make_prefix(bare_prefix, tmp_path_factory.mktemp("unpack") / "env")


@dataclass(frozen=True)
class Model:
    """A published model's folder."""

    folder: Path

    def unpack(self, folder: Path, *options: str) -> int:
        return main(["unpack", str(folder), "--model-repository", str(self.folder.parent), *options])


@pytest.fixture(scope="module", params=sorted(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> str:
    """Each of them."""
    return str(request.param)


@pytest.fixture(scope="module")
def model(layout: str, prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The prefix in a model's folder of this layout, with its manifest."""
    return Model(small_model.publish(prefix, layout, tmp_path_factory.mktemp(layout)))


def folders_of(tree: Path) -> list[Path]:
    """A folder and all below it."""
    return [tree, *(path for path in tree.rglob("*") if path.is_dir() and not path.is_symlink())]


def contents(tree: Path) -> dict[str, object]:
    """Each file and link by its name, with its content and whether it can be run."""
    found: dict[str, object] = {}
    for path in tree.rglob("*"):
        name = str(path.relative_to(tree))
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = (file_sha256(path), bool(path.stat().st_mode & stat.S_IXUSR))
    return found


def test_it_is_the_whole_environment_for_every_user_and_place(
    model: Model, prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that the prefix has, and nothing of the small archive's own; it runs after a move, whatever the umask was."""
    (tmp_path / "new").mkdir()
    before = os.umask(0o077)
    try:
        assert model.unpack(tmp_path / "new/env", "--json") == 0
    finally:
        os.umask(before)
    facts = json.loads(capsys.readouterr().out)
    assert facts["environment"] == str(tmp_path / "new/env")
    assert facts["bytes"] > 10**6
    whole = contents(tmp_path / "new/env")
    assert whole.keys() >= {*contents(prefix), "bin/activate"} - {f"{SITE}/README.txt"}
    assert not {Path(name).name for name in whole} & set(parts_unpack.OWN)
    assert {path.stat().st_mode & 0o555 for path in folders_of(tmp_path / "new/env")} == {0o555}
    (tmp_path / "new/env").rename(tmp_path / "moved")
    for program, said in (("ray", "started"), ("python", "vllm")):
        options = ["-c", "import vllm; print(vllm.__name__)"] if program == "python" else []
        done = subprocess.run([tmp_path / "moved/bin" / program, *options], capture_output=True, text=True, check=True, env={})
        assert done.stdout == f"{said}\n"


def test_an_empty_folder_may_be_there(model: Model, tmp_path: Path) -> None:
    """As the mount point of a volume is; it stays the same folder, with its mode."""
    target = tmp_path / "volume"
    target.mkdir()
    target.chmod(0o700)
    before = target.stat()
    assert model.unpack(target) == 0
    assert (target.stat().st_ino, target.stat().st_mode) == (before.st_ino, before.st_mode)
    assert os.access(target / "bin/python", os.X_OK)
    assert not [path for path in target.iterdir() if path.name.startswith(".")]


def test_what_a_killed_run_left_goes(model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless another run is still at work there: then the folder is not empty."""
    target = tmp_path / "new"
    (target / ".vllm_env.killed/1").mkdir(parents=True)
    with locked_folder(target, ".vllm_env."):
        assert model.unpack(target) == 2
        assert "is not an empty folder" in capsys.readouterr().err
    assert model.unpack(target) == 0
    assert not list(target.glob(".*"))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_there_is_not_touched(model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """A folder with anything in it, or a file: wrong usage."""
    target = tmp_path / "there"
    mine = target
    if kind == "folder":
        target.mkdir()
        mine = target / "mine"
    mine.write_text("mine")
    assert model.unpack(target) == 2
    said = capsys.readouterr().err
    assert f"{target} is not an empty folder" in said
    assert "emove" not in said
    assert mine.read_text() == "mine"
    assert kind == "file" or [path.name for path in target.iterdir()] == ["mine"]


def test_a_changed_file_is_refused_and_nothing_is_left(
    model: Model, layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its digest, before anything is unpacked. The files of an unpacked environment have none."""
    if layout == "directory":
        pytest.skip("its files are not recorded")
    copy = Model(shutil.copytree(model.folder, tmp_path / "models/vllm"))
    for file in ("vllm_env.tar.gz", "vllm_env.parts/000.tar.gz")[: 1 + (layout == "parts")]:
        archive = copy.folder / file
        before = archive.read_bytes()
        archive.write_bytes(before[:-9] + b"x" * 9)
        assert copy.unpack(tmp_path / "new/env") == 1
        assert f"{archive} does not match" in capsys.readouterr().err
        assert not (tmp_path / "new/env").exists()
        archive.write_bytes(before)


def test_a_folder_that_cannot_be_made_is_refused_before_the_digests(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    """They take a minute for an archive of 4 GB."""
    assert model.unpack(Path("/proc/foo")) == 1
    said = capsys.readouterr().err
    assert "error: /proc/foo cannot be written" in said
    assert "unpack …" not in said


def test_too_little_space_is_told_before(
    model: Model, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the folder that was made for it is gone again."""
    monkeypatch.setattr("vllm_env.base.filesystem.free_space", lambda _: 1000)
    assert model.unpack(tmp_path / "new") == 1
    work = "copying" if layout == "directory" else "unpacking"
    assert f"No space: {work} the " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_what_comes_into_the_folder_meanwhile_stays(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another machine may unpack to the same place at the same time; it is refused, and only its own files go."""
    unpack_into = unpack_module._unpack_into

    def unpack_beside_another(*arguments: Any) -> None:
        unpack_into(*arguments)
        (tmp_path / "new/lib").mkdir()

    monkeypatch.setattr(unpack_module, "_unpack_into", unpack_beside_another)
    assert model.unpack(tmp_path / "new") == 2
    assert "is no longer empty: somebody has put lib there" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["lib"]


@pytest.mark.parametrize("is_there", [False, True])
def test_an_error_while_the_files_are_placed_leaves_nothing(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """As before: no folder, or an empty one."""
    rename = Path.rename

    def fails_at_last(path: Path, target: Path) -> Path:
        if Path(target) == tmp_path / "new/bin":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails_at_last)
    if is_there:
        (tmp_path / "new").mkdir()
    assert model.unpack(tmp_path / "new") == 1
    assert (list((tmp_path / "new").iterdir()) == []) if is_there else not (tmp_path / "new").exists()


def test_a_model_that_was_not_built_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says how to build it."""
    assert Model(tmp_path / "models/vllm").unpack(tmp_path / "new") == 1
    assert "holds no built environment" in capsys.readouterr().err
