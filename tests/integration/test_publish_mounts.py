"""Volumes that are mounted at or inside the model's folder, real bind mounts: what they hold stays, and the set is placed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support import fake_tritonserver
from support.namespaces import with_mounts
from support.repositories import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

_TEMPLATE = CHECKOUT / "model_repository" / "vllm"
_PUBLISH = """
import json, sys
from pathlib import Path
from vllm_env.base.cache import Cache
from vllm_env.base.workspace import Workspace
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.publish.model_folder import BuiltSet
from vllm_env.publish.publish import check_writable, publish
repository, template, layout, tag, early = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
cache = repository.parent.parent / "cache"
(cache / tag / "bin").mkdir(parents=True)
for file in (cache / f"stub-{tag}", cache / f"env-{tag}", cache / tag / "bin" / "activate"):
    file.write_text(tag)
environment = cache / tag if layout == "directory" else cache / f"env-{tag}"
if early:
    check_writable(repository, "vllm")
built = BuiltSet(cache / f"stub-{tag}", environment, LAYOUTS[layout], json.dumps({"tag": tag}), "{}")
publish(Workspace(Cache(cache)), built, repository, "vllm", template)
"""
_REMOVE = """
import sys
from pathlib import Path
from vllm_env.base.filesystem import remove_tree
remove_tree(Path(sys.argv[1]))
"""
_COPY_CODE = """
import sys
from pathlib import Path
from vllm_env.publish.model_folder import copy_code
copy_code(Path(sys.argv[1]), Path(sys.argv[2]))
"""
_WARM = """
import sys
from pathlib import Path
from vllm_env.base.cache import Cache
from vllm_env.base.workspace import Workspace
from vllm_env.serve.warm import warm
binary, model, log = map(Path, sys.argv[1:])
warm(Workspace(Cache(log.parent)), binary, model, log=log)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a published model, "one", beside which lies nothing else."""
    place = tmp_path / "place" / "models"
    _publish(place, tag="one")
    return place


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """What the user has on the host: a folder with a space in its name, 100 files and a folder."""
    folder = tmp_path / "the volume"
    (folder / "deep").mkdir(parents=True)
    for number in range(100):
        (folder / "deep" / f"{number}.safetensors").write_text("weights")
    return folder


def _run(code: str, *arguments: object, before: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-c", code, *(str(argument) for argument in arguments)],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT / "env"), "FAKE_TRITON": "fills"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def _publish(
    repository: Path,
    *pairs: tuple[Path, Path],
    tag: str = "two",
    layout: str = "archive",
    template: Path = _TEMPLATE,
    early: str = "",
) -> subprocess.CompletedProcess[str]:
    before = with_mounts(*pairs) if pairs else []
    return _run(_PUBLISH, repository, template, layout, tag, early, before=before)


def _tags(model: Path) -> set[str]:
    manifest = json.loads((model / "vllm_env.json").read_text())["tag"]
    return {manifest, (model / "vllm_env.tar.gz").read_text(), (model / "triton_python_backend_stub").read_text()}


def _is_whole(volume: Path) -> bool:
    return [len(list(folder.iterdir())) for folder in (volume, volume / "deep")] == [1, 100]


def _strays(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(".vllm_env")]


@pytest.mark.parametrize("point", ["weights", "my weights/llama", "1/weights"])
def test_a_volume_inside_the_model_keeps_what_it_holds(repository: Path, volume: Path, point: str) -> None:
    """Not a file of it is removed, copied or linked, and the new set is in place."""
    model = repository / "vllm"
    (model / point).mkdir(parents=True)
    done = _publish(repository, (volume, model / point))
    assert done.returncode == 0, done.stderr
    assert _is_whole(volume)
    assert _tags(model) == {"two"}
    assert list((model / point).iterdir()) == []
    assert {file.stat().st_nlink for file in (volume / "deep").iterdir()} == {1}
    assert _strays(repository.parent) == []


def test_a_file_that_is_mounted_stays_mounted(repository: Path, tmp_path: Path) -> None:
    """As a container's configuration is given to it: the folder must not be exchanged, or the mount goes with the old one."""
    own = tmp_path / "own.json"
    own.write_text("mine")
    done = _publish(repository, (own, repository / "vllm" / "vllm_engine_args.json"))
    assert done.returncode == 0, done.stderr
    assert _tags(repository / "vllm") == {"two"}
    assert own.read_text() == "mine"
    assert _strays(repository.parent) == []


@pytest.mark.parametrize("mounted", ["models", "models/vllm"])
@pytest.mark.parametrize("new", [True, False])
def test_a_mounted_repository_or_model_is_published(repository: Path, tmp_path: Path, mounted: str, new: bool) -> None:
    """Of the same file system, where st_dev tells nothing and a rename into the mount fails."""
    elsewhere = tmp_path / "elsewhere"
    if new:
        elsewhere.mkdir()
    else:
        (repository.parent / mounted).rename(elsewhere)
        (repository.parent / mounted).mkdir()
    done = _publish(repository, (elsewhere, repository.parent / mounted))
    assert done.returncode == 0, done.stderr
    assert _tags(elsewhere / "vllm" if mounted == "models" else elsewhere) == {"two"}
    assert _strays(tmp_path) == []


@pytest.mark.parametrize("early", ["", "early"])
@pytest.mark.parametrize("layout", ["archive", "directory"])
def test_a_volume_where_the_environment_goes_is_refused(repository: Path, volume: Path, layout: str, early: str) -> None:
    """It would have to be emptied; the message has the place and the remedy, and the old set stays. Early: before a build."""
    point = repository / "vllm" / "vllm_env"
    point.mkdir()
    done = _publish(repository, (volume, point), layout=layout, early=early)
    assert f"{point} is a mount point" in done.stderr
    assert f"umount {point}" in done.stderr
    assert ("check_writable" in done.stderr.split("Traceback")[-1]) is bool(early)
    assert _is_whole(volume)
    assert _tags(repository / "vllm") == {"one"}


def test_a_new_model_gets_nothing_of_the_templates_volumes(repository: Path, volume: Path, tmp_path: Path) -> None:
    """The template is a model that is in use; gigabytes of weights that are mounted there belong to it alone."""
    (repository / "vllm" / "weights").mkdir()
    done = _publish(tmp_path / "other" / "models", (volume, repository / "vllm" / "weights"), template=repository / "vllm")
    assert done.returncode == 0, done.stderr
    assert _is_whole(volume)
    assert _tags(tmp_path / "other" / "models" / "vllm") == {"two"}
    assert not (tmp_path / "other" / "models" / "vllm" / "weights").exists()


def test_nothing_is_removed_beyond_a_mount_point(volume: Path, tmp_path: Path) -> None:
    """Staging that an older version left, with a volume that it moved there, is not entered."""
    point = tmp_path / "staging" / "vllm" / "weights"
    point.mkdir(parents=True)
    assert _run(_REMOVE, tmp_path / "staging", before=with_mounts((volume, point))).returncode == 0
    assert _is_whole(volume)
    assert _run(_REMOVE, tmp_path / "staging", before=[]).returncode == 0
    assert not (tmp_path / "staging").exists()


def test_the_smoke_run_takes_no_volume_of_data(repository: Path, volume: Path, tmp_path: Path) -> None:
    """Files without a weight's suffix, as a hub's cache has them, in a volume inside the version folder."""
    (volume / "deep" / "blob").write_text("weights")
    point = repository / "vllm" / "1" / "hub"
    point.mkdir()
    done = _run(_COPY_CODE, repository / "vllm" / "1", tmp_path / "copy", before=with_mounts((volume, point)))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "copy" / "model.py").is_file()
    assert not (tmp_path / "copy" / "hub").exists()


@pytest.mark.parametrize("point", ["vllm_cache", "vllm_cache/torch_compile_cache"])
def test_warming_refuses_a_volume_in_the_caches_at_once(repository: Path, volume: Path, point: str) -> None:
    """Before the minutes of loading, with the place and the remedy."""
    model, log = repository / "vllm", repository.parent / "server.log"
    (model / point).mkdir(parents=True)
    binary = fake_tritonserver.launcher(repository.parent)
    done = _run(_WARM, binary, model, log, before=with_mounts((volume, model / point)))
    assert f"{model / point} is a mount point" in done.stderr
    assert f"umount {model / point}" in done.stderr
    assert not log.exists()
    assert _is_whole(volume)
