"""The archive and the build's incremental stages, on the small vLLM, by the real command line."""

from __future__ import annotations

import functools
import gzip
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support import small_build
from support.thin_builds import fill_cache, finished_lab, make_thin_lab
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.layout.tar import contents_of

if TYPE_CHECKING:
    from support.chaos_lab import Lab


def _archive(repository: Path) -> Path:
    return repository / "vllm" / "vllm_env.tar.gz"


def _packed(repository: Path) -> set[str]:
    """The members of the archive and of all parts."""
    files = [_archive(repository), *(repository / "vllm/vllm_env.parts").iterdir()]
    found: set[str] = set()
    for file in files:
        with tarfile.open(file) as archive:
            found.update(archive.getnames())
    return found


def _manifest(repository: Path) -> dict[str, Any]:
    return dict(json.loads((repository / "vllm/vllm_env.json").read_text()))


def _build(place: Path, channel: Path, wheel: Path, standins: Path) -> Lab:
    fill_cache(channel, place / "cache")
    lab = make_thin_lab(place, wheel, standins)
    done = small_build.build(lab.cache, lab.repository, "--spec", lab.spec, "--layout", "archive", **lab.variables)
    assert done.returncode == 0, done.stderr
    return lab


@pytest.fixture(scope="module")
def built(thin_channel: Path, small_wheel: Path, thin_wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """One build, which the tests read."""
    return _build(tmp_path_factory.mktemp("built"), thin_channel, small_wheel, thin_wheels)


def test_two_clean_builds_of_one_lock_are_equal(
    built: Lab, thin_channel: Path, small_wheel: Path, thin_wheels: Path, tmp_path: Path
) -> None:
    """Another cache, another place, another time, another copy of the spec: the same SHA-256."""
    other = _build(tmp_path / "a/longer/path/for/the/second", thin_channel, small_wheel, thin_wheels)
    assert file_sha256(_archive(other.repository)) == file_sha256(_archive(built.repository))
    assert _manifest(other.repository)["built_at"] != _manifest(built.repository)["built_at"]
    assert _manifest(other.repository)["key"] == _manifest(built.repository)["key"]


def test_a_changed_requirement_runs_only_the_stages_after_it(
    finished_place: Path, thin_wheels: Path, small_wheel: Path, tmp_path: Path
) -> None:
    """Nothing changed: nothing is built. --with: another key; back again: prefix and archive come from the cache."""
    lab = finished_lab(finished_place, tmp_path, small_wheel, thin_wheels)
    models = lab.repository
    build = functools.partial(small_build.build, lab.cache, models, "--spec", lab.spec, "--with", lab.targets[0], **lab.variables)
    key, digest = _manifest(models)["key"], file_sha256(_archive(models))

    again = build()
    assert "is up to date; nothing to build" in again.stderr
    assert "prefix" not in again.stderr

    other = build("--with", "pluggy")
    assert other.returncode == 0, other.stderr
    assert _manifest(models)["key"] != key
    assert any(name.startswith("lib/python3.11/site-packages/pluggy/") for name in _packed(models))

    back = build()
    assert "bytecode compiled" not in back.stderr
    assert back.stderr.count("reused") >= 2
    assert _manifest(models)["key"] == key
    assert file_sha256(_archive(models)) == digest


def test_the_archive_holds_what_triton_needs_and_nothing_of_the_build(built: Lab) -> None:
    """bin/activate, libpython, the hook; no conda-unpack; no place of the build; the manifest tells the truth."""
    with tarfile.open(_archive(built.repository)) as archive:
        members = {m.name: m for m in archive}
    assert {"bin/activate", "bin/python", "lib/libpython3.11.so.1.0"} <= set(members)
    assert "lib/python3.11/site-packages/00_vllm_env.pth" in members
    assert not any("conda-unpack" in name for name in members)
    assert not any(name.startswith("/") or ".." in name.split("/") for name in members)
    data = gzip.decompress(_archive(built.repository).read_bytes())
    for place in (built.cache.parent, Path.home() / ".cache"):
        assert str(place).encode() not in data
    facts = _manifest(built.repository)["archive"]
    assert facts["members"] == len(members)
    assert facts["sha256"] == file_sha256(_archive(built.repository))


def test_a_dry_run_says_what_would_be_warmed(built: Lab) -> None:
    """The model, its arguments and the folder; nothing is started, and nothing is written."""
    before = sorted(p.name for p in (built.repository / "vllm").iterdir())
    done = small_build.build(built.cache, built.repository, "--spec", built.spec, "--warm", "--dry-run", **built.variables)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("warm ")]
    model = built.repository / "vllm"
    assert str(model) in line
    assert str(model / "vllm_cache") in line
    assert "with its own engine arguments" in line
    assert sorted(p.name for p in model.iterdir()) == before


def test_an_extracted_archive_runs(built: Lab, tmp_path: Path) -> None:
    """Unpacked elsewhere by tar, vLLM is imported from there, and no bytecode is written."""
    place = tmp_path / "extracted"
    place.mkdir()
    subprocess.run(["tar", "-xzf", _archive(built.repository), "-C", place], check=True)
    before = {p for p in place.rglob("*") if p.is_file()}
    output = subprocess.check_output([place / "bin/python", "-c", "import vllm; print(vllm.__file__)"], text=True)
    assert output.strip() == str(place / "lib/python3.11/site-packages/vllm/__init__.py")
    assert {p for p in place.rglob("*") if p.is_file()} == before


def test_a_repository_whose_archive_was_cut_off_is_built_again(built: Lab, tmp_path: Path) -> None:
    """The words "up to date" are not said of files that are not the manifest's."""
    models = tmp_path / "models"
    shutil.copytree(built.repository, models)
    with _archive(models).open("r+b") as stream:
        stream.truncate(1000)
    done = small_build.build(built.cache, models, "--spec", built.spec, "--layout", "archive", **built.variables)
    assert done.returncode == 0, done.stderr
    assert file_sha256(_archive(models)) == _manifest(models)["archive"]["sha256"]


def test_an_editable_install_is_refused(bare_prefix: Path, tmp_path: Path) -> None:
    """It only points to a tree that is not in the archive: conda-pack says so, and we say what to do."""
    prefix = tmp_path / "env"
    shutil.copytree(bare_prefix, prefix, symlinks=True)
    tree = small_build.make_tree(tmp_path / "tree")
    uv = Path(sys.executable).parent / "uv"
    install: list[str | Path] = [uv, "pip", "install", "--quiet", "--no-deps", "--python", prefix / "bin/python"]
    install += ["--editable", tree]
    subprocess.run(install, check=True)
    with pytest.raises(VllmEnvError, match="conda-pack refuses") as caught:
        contents_of(prefix)
    assert "editable" in caught.value.remedy
