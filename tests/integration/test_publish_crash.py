"""Publishing is killed at any moment, many times: a reader finds the old set or the new."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from support.repositories import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

_PUBLISHES = """
import json, sys
from pathlib import Path
from vllm_env.base.cache import Cache
from vllm_env.base.workspace import Workspace
from vllm_env.publish import publish as module
from vllm_env.publish.model_folder import BuiltSet
from vllm_env.publish.publish import publish
folder, template, way = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
if way == "in place":
    module._staging_place = lambda _: None
workspace = Workspace(Cache(folder))
print("starts", flush=True)
for number in range(10**6):
    tag = str(number % 2)
    files = [folder / f"{kind}{tag}" for kind in ("stub", "env")]
    for file in files:
        if not file.exists():
            file.write_text(tag * 100_000)
    built = BuiltSet(*files, "archive", json.dumps({"tag": tag}), "{}")
    publish(workspace, built, folder / "place" / "models", "vllm", template)
"""


def _start(folder: Path, way: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", _PUBLISHES, folder, CHECKOUT / "model_repository" / "vllm", way],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT / "env")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout
    child.stdout.readline()
    return child


def _tags(model: Path) -> set[str]:
    texts = [(model / name).read_text() for name in ("triton_python_backend_stub", "vllm_env.tar.gz")]
    assert {len(text) for text in texts} == {100_000}
    return {json.loads((model / "vllm_env.json").read_text())["tag"], *(text[0] for text in texts)}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The folder that holds the repository and, for a moment, the staging."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_publish_leaves_a_whole_set(tmp_path: Path, place: Path, number: signal.Signals) -> None:
    """25 kills at random moments of publishing without pause: never a mix, and the next one removes what was staged."""
    for _ in range(25):
        child = _start(tmp_path, "exchange")
        time.sleep(random.uniform(0.01, 0.15))
        child.send_signal(number)
        child.wait()
        if (place / "models" / "vllm").exists():
            assert len(_tags(place / "models" / "vllm")) == 1
            assert (place / "models" / "vllm" / "1" / "model.py").is_file()
    child = _start(tmp_path, "exchange")
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    child.wait()
    assert [p.name for p in place.iterdir()] == ["models"]


def test_a_publish_in_place_mends_what_a_crash_tore(tmp_path: Path, place: Path) -> None:
    """Where no exchange is possible each file is whole, and the next run completes the set."""
    model = place / "models" / "vllm"
    for _ in range(15):
        child = _start(tmp_path, "in place")
        time.sleep(random.uniform(0.01, 0.1))
        child.kill()
        child.wait()
        if (model / "vllm_env.json").exists():
            _tags(model)  # every file is one of the two, none is cut off
    child = _start(tmp_path, "in place")
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    child.wait()
    assert (model / "config.pbtxt").is_file()
    assert (model / "1" / "model.py").is_file()
    assert not [p for p in model.iterdir() if p.name.startswith(".vllm_env.staging")]
