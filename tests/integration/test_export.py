"""``export``: what other programs make of the image, and what is left when it is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from support import containers, small_model
from support.once import once
from support.repositories import CHECKOUT
from support.small_disk import small_disk
from vllm_env.base.errors import VllmEnvError
from vllm_env.interpreter.find import find_interpreter

_LIMIT_KB = 1_000_000

# Runs the command line, and kills itself at a moment: when all layers are written, or when a name is moved into the folder.
_KILLED = """
import os, signal, sys
from pathlib import Path
from vllm_env.cli.main import main
from vllm_env.export.image import Image
moment = sys.argv.pop(1)
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
rename = Path.rename
Path.rename = lambda path, target: die() if Path(target).name == moment else rename(path, target)
if moment == "layers":
    Image.finish = die
sys.exit(main())
"""
# Takes every disk for an empty one, as if somebody filled it during the export.
_BELIEVES = """
import sys
from vllm_env.base import filesystem
from vllm_env.cli.main import main
filesystem.free_space = lambda _: 10**12
sys.exit(main())
"""
_DEBIAN = Path("/usr/bin/python3")
_OTHER = 12345


@pytest.fixture(scope="module")
def models(bare_prefix: Path) -> Path:
    """A repository with a small model; read it, do not change it."""

    def make(place: Path) -> Path:
        prefix = small_model.make_prefix(bare_prefix, place / "env")
        return small_model.publish(prefix, "parts", place).parent

    return once("export/models", make)


@pytest.fixture(scope="module")
def digests(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digest of its image by each compression."""
    folder = tmp_path_factory.mktemp("digests")
    return {name: export(models, folder / name, "--compression", name)["digest"] for name in ("gzip", "zstd")}


def export(models: Path, folder: Path, *options: str, python: tuple[str | Path, ...] = (sys.executable,)) -> dict[str, Any]:
    """Export a repository's model in a process of its own; return the result."""
    done = _run(["-m", "vllm_env"], models, folder, "--json", *options, python=python)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def _run(
    program: list[str], models: Path, folder: Path, *options: str, python: tuple[str | Path, ...] = (sys.executable,)
) -> subprocess.CompletedProcess[str]:
    argv = [*python, *program, "export", "--oci", str(folder), "--model-repository", str(models), *options]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT / "env"), "VLLM_ENV_CACHE": str(models.parent / "cache")}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize("moment", ["layers", "blobs", "index.json"])
def test_a_killed_export_leaves_no_image_and_the_next_one_cleans_up(models: Path, moment: str, tmp_path: Path) -> None:
    """Also between the blobs and the index, without which no program takes the folder for an image."""
    folder = tmp_path / "image"
    killed = _run(["-c", _KILLED, moment], models, folder)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list(folder.iterdir()) != []
    assert not (folder / "index.json").exists()
    facts = export(models, folder)
    assert {path.name for path in folder.iterdir()} == {"blobs", "index.json", "oci-layout", "Dockerfile"}
    expected = {layer["digest"].removeprefix("sha256:") for layer in facts["layers"]}
    assert expected < {path.name for path in (folder / "blobs/sha256").iterdir()}


@pytest.mark.parametrize(
    ("layout", "program", "said"),
    [
        ("parts", ["-m", "vllm_env"], "No space: unpacking the parts needs"),
        ("directory", ["-m", "vllm_env"], "No space: the image needs"),
        ("parts", ["-c", _BELIEVES], "The file system is full"),
        ("directory", ["-c", _BELIEVES], "cannot be filled: No space left on device"),
    ],
)
def test_a_full_disk_is_told_and_nothing_is_left(
    bare_prefix: Path, layout: str, program: list[str], said: str, tmp_path: Path
) -> None:
    """Before anything is written, or when somebody else fills it meanwhile; then the same folder takes the image."""

    def make(place: Path) -> Path:
        return small_model.publish(small_model.make_prefix(bare_prefix, place / "env"), layout, place).parent

    models = once(f"export/{layout}", make)
    with small_disk(tmp_path / "disk", "6m") as disk:
        folder = disk / "image"
        done = _run(program, models, folder)
        assert done.returncode == 1
        assert said in done.stderr
        assert "  fix: " in done.stderr
        assert "Traceback" not in done.stderr
        assert list(disk.iterdir()) == []
        subprocess.run(["mount", "-o", "remount,size=300m", disk], check=True)
        export(models, folder)


def test_files_of_the_user_stay_where_an_export_was_killed(models: Path, tmp_path: Path) -> None:
    """They came later: the folder is not empty."""
    folder = tmp_path / "image"
    assert _run(["-c", _KILLED, "layers"], models, folder).returncode == -signal.SIGKILL
    (folder / "mine").write_text("mine")
    assert _run(["-m", "vllm_env"], models, folder).returncode == 2
    assert [path.name for path in folder.iterdir()] == ["mine"]


def test_a_registry_has_the_printed_digest_and_gets_only_what_is_new(models: Path, tmp_path: Path) -> None:
    """By the printed line; umoci reads the folder; other arguments add one layer of a few bytes."""
    own = Path(shutil.copytree(models, tmp_path / "models"))
    with containers.registry(tmp_path) as address:
        first = export(own, tmp_path / "first")
        assert _push(first, address) == first["digest"]
        before = _blobs(tmp_path)
        (own / "vllm/vllm_engine_args.json").write_text('{"model": "another"}')
        second = export(own, tmp_path / "second", "--tag", "v2")
        assert _push(second, address) == second["digest"]
        added = _blobs(tmp_path) - before
        documents = {second["digest"], _manifest(tmp_path / "second", second)["config"]["digest"]}
        assert added == documents | {second["layers"][-1]["digest"]}
        zstd = export(own, tmp_path / "third", "--compression", "zstd", "--tag", "v3")
        assert _push(zstd, address) == zstd["digest"]
    _check_by_umoci(tmp_path / "first", first["tag"], tmp_path / "bundle")
    assert (tmp_path / "bundle/rootfs/models/vllm/config.pbtxt").is_file()


def _push(facts: dict[str, Any], address: str) -> str:
    """Type the printed line; return the digest under which the registry has the tag."""
    line = next(line for line in facts["push"] if line.startswith("skopeo"))
    command = f"{line} --dest-tls-verify=false"
    subprocess.run(["sh", "-ec", command], env={**os.environ, "REGISTRY": address}, check=True, capture_output=True)
    image = f"docker://{address}/vllm:{facts['tag']}"
    inspected = subprocess.check_output(["skopeo", "inspect", "--tls-verify=false", image])
    return str(json.loads(inspected)["Digest"])


def _blobs(folder: Path) -> set[str]:
    """The digests of all blobs in a registry's storage."""
    return {f"sha256:{path.parent.name}" for path in (folder / "registry").rglob("blobs/sha256/*/*/data")}


def _manifest(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads((folder / "blobs/sha256" / facts["digest"].removeprefix("sha256:")).read_bytes()))


def _check_by_umoci(folder: Path, tag: str, bundle: Path) -> None:
    """Extract an image by a program of its own; it compares every digest."""
    rootless = [] if os.geteuid() == 0 else ["--rootless"]
    command = ["umoci", "unpack", *rootless, "--image", f"{folder}:{tag}", str(bundle)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_large_file_takes_little_memory(bare_prefix: Path, disk_folder: Path) -> None:
    """It is read in pieces: a file of 1.5 GB, which takes no space on the disk."""
    prefix = small_model.make_prefix(bare_prefix, disk_folder / "env")
    model = small_model.publish(prefix, "directory", disk_folder / "built")
    with (model / "vllm_env/lib/large.so").open("wb") as large:
        large.truncate(1_500_000_000)
    argv = [sys.executable, "-m", "vllm_env", "export", "--quiet", "--oci", str(disk_folder / "image")]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT / "env"), "VLLM_ENV_CACHE": str(disk_folder / "cache")}
    child = subprocess.Popen([*argv, "--model-repository", str(model.parent)], env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    assert usage.ru_maxrss < _LIMIT_KB


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.12", "3.13", "3.14"])
def test_another_python_on_one_core_exports_the_same_image(
    models: Path, digests: dict[str, str], version: str, disk_folder: Path
) -> None:
    """With the packages of the builder's lock. Python's own zlib differs between builds."""
    try:
        interpreter = find_interpreter(version).executable
    except VllmEnvError as error:
        pytest.skip(str(error))
    python = _builder(interpreter, disk_folder / "builder")
    for compression, digest in digests.items():
        options = ("--compression", compression)
        facts = export(models, disk_folder / compression, *options, python=("taskset", "--cpu-list", "0", python))
        assert facts["digest"] == digest


@pytest.mark.skipif(os.geteuid() != 0 or not _DEBIAN.exists(), reason="only root becomes another user")
def test_another_user_exports_the_same_image(models: Path, digests: dict[str, str]) -> None:
    """From a checkout and a model of their own, with another Python."""
    with tempfile.TemporaryDirectory(prefix="vllm_env_test_") as name:
        own = Path(name)
        python = _builder(_DEBIAN, own / "builder")
        shutil.copytree(CHECKOUT / "env", own / "env")
        shutil.copytree(models, own / "models")
        for path in (own, *own.rglob("*")):
            os.chown(path, _OTHER, _OTHER, follow_symlinks=False)
        as_other = ("setpriv", f"--reuid={_OTHER}", f"--regid={_OTHER}", "--clear-groups")
        facts = export(own / "models", own / "image", python=(*as_other, "env", f"PYTHONPATH={own}/env", "HOME=/", python))
        assert {path.stat().st_uid for path in (own / "image").rglob("*")} == {_OTHER}
    assert facts["digest"] == digests["gzip"]


def _builder(interpreter: Path, folder: Path) -> Path:
    """Make an environment for the packager with another interpreter; return its Python."""
    uv = Path(sys.executable).parent / "uv"
    subprocess.run([uv, "venv", "-q", "--python", interpreter, folder], check=True)
    lock = CHECKOUT / "env/requirements.txt"
    python = folder / "bin/python"
    subprocess.run([uv, "pip", "install", "-q", "--require-hashes", "--python", python, "-r", lock], check=True)
    return python
