"""``--cuda 12.9``: vLLM and torch for an older driver, from indexes that are laid out as the public ones."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from support import small_build
from support.cuda_indexes import SPEC, cuda_indexes
from support.fake_driver import make_driver
from support.small_fixtures import workspace_in
from support.thin_builds import fill_cache
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.network import Network, PipConfig
from vllm_env.lock.lock import LockOptions, make_lock
from vllm_env.lock.pylock import read_pylock
from vllm_env.lock.spec import Overrides, Pin, load_spec
from vllm_env.triton.root import rules_of
from vllm_env.wheelhouse import _fetch_wheels

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.cuda_indexes import CudaIndexes
    from vllm_env.lock.pylock import Lock


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[CudaIndexes]:
    with cuda_indexes(tmp_path / "indexes") as served:
        yield served


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    (tmp_path / "spec").mkdir()
    file = tmp_path / "spec/cuda.toml"
    file.write_text(SPEC)
    return file


def _lock(file: Path, cache: Path, indexes: CudaIndexes, variant: str | None = "cu129", pin: Pin | None = None) -> Lock:
    network = Network(PipConfig(index_url=indexes.registry), torch_index=indexes.torch)
    overrides = Overrides(pin=pin, torch_backend=variant, wheel_index=indexes.vllm if variant else None)
    return make_lock(workspace_in(cache, network), load_spec("cuda", overrides, file), rules_of("24.10"), LockOptions())


def test_a_variant_has_its_own_vllm_and_torch_and_nothing_for_cuda_13(
    indexes: CudaIndexes, spec_file: Path, small_cache: Path
) -> None:
    """Without the option, the lock is the registry's, for CUDA 13."""
    lock = _lock(spec_file, small_cache, indexes)
    places = {wheel.name: (wheel.version, wheel.index) for wheel in lock.wheels if wheel.index}
    assert places == {"vllm": ("0.99.0+cu129", "vllm"), "torch": ("9.9.0+cu129", "pytorch")}
    versions = lock.versions()
    assert versions["cuda-python"] == versions["cuda-bindings"] == "12.9.4"
    assert "nvidia-cutlass-dsl-libs-cu12" in versions
    assert not {"nvidia-cutlass-dsl-libs-cu13", "nvidia-cuda-runtime"} & {*versions}
    assert lock.cuda == "12.9"
    default = _lock(spec_file, small_cache, indexes, variant=None)
    assert {wheel.index for wheel in default.wheels} == {""}
    assert default.versions()["cuda-python"] == "13.0.1"
    assert "nvidia-cutlass-dsl-libs-cu13" in default.versions()
    assert default.cuda == "13.0"


def test_a_torch_for_another_cuda_version_is_refused(tmp_path: Path, spec_file: Path, small_cache: Path) -> None:
    """The registry's torch fits what vLLM asks for, and would end with a CUDA error."""
    with (
        cuda_indexes(tmp_path / "without", has_torch=False) as indexes,
        pytest.raises(VllmEnvError, match="have no solution") as caught,
    ):
        _lock(spec_file, small_cache, indexes)
    assert caught.value.remedy.startswith("If PyTorch's index has no torch for CUDA 12.9: Give another --cuda")
    with (
        cuda_indexes(tmp_path / "frugal", has_torch=False, torch_needs=()) as indexes,
        pytest.raises(VllmEnvError, match=r"--cuda 12.9: PyTorch's index has no torch 9.9.0 for this") as caught,
    ):
        _lock(spec_file, small_cache, indexes)
    assert "VLLM_ENV_TORCH_INDEX" in caught.value.remedy


def test_a_variant_that_vllm_does_not_publish_is_named(indexes: CudaIndexes, spec_file: Path, small_cache: Path) -> None:
    """With the place to look for those that there are."""
    with pytest.raises(VllmEnvError, match=r"--cuda 12.6: vLLM's index has no vllm==0.99.0\+cu126") as caught:
        _lock(spec_file, small_cache, indexes, "cu126")
    assert f"{indexes.vllm}/0.99.0/cu126" in caught.value.cause
    assert f"{indexes.vllm}/0.99.0/," in caught.value.remedy


def test_a_commit_does_not_fall_back_to_the_build_for_another_cuda_version(
    indexes: CudaIndexes, spec_file: Path, small_cache: Path, tmp_path: Path
) -> None:
    """The index has the default build of the commit only: git is asked next."""
    sha = "1" * 40
    default = tmp_path / "indexes/vllm" / sha / "vllm"
    default.mkdir(parents=True)
    (default / "index.html").write_text('<a href="../../0.99.0/cu129/vllm/vllm-0.99.0%2Bcu129-py3-none-any.whl">vllm-1.whl</a>')
    with pytest.raises(VllmEnvError, match="fetch commit"):
        _lock(spec_file, small_cache, indexes, pin=Pin("commit", sha))


def test_a_wheelhouse_has_the_wheels_of_every_index(
    indexes: CudaIndexes, spec_file: Path, small_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the folder alone, the lock is the same."""
    for name, value in indexes.variables.items():
        monkeypatch.setenv(name, value)
    lock = _lock(spec_file, small_cache, indexes)
    pip = PipConfig(index_url=indexes.registry)
    _fetch_wheels(workspace_in(small_cache, Network(pip, torch_index=indexes.torch)), lock, tmp_path / "house")
    assert {file.name for file in (tmp_path / "house").iterdir()} == {wheel.file for wheel in lock.wheels}
    offline = workspace_in(small_cache, Network(pip, offline=True, wheelhouse=tmp_path / "house"))
    again = make_lock(offline, lock.spec, rules_of("24.10"), LockOptions(upgrade=True))
    assert again.digest == lock.digest
    assert {wheel.name for wheel in again.wheels if wheel.index} == {"vllm", "torch"}


@pytest.mark.long
def test_on_a_machine_with_an_old_driver_the_build_names_the_option_that_works(
    indexes: CudaIndexes, thin_channel: Path, spec_file: Path, tmp_path: Path
) -> None:
    """The driver runs CUDA 12.2; whoever builds for another machine gets a note only."""
    cache, saved = tmp_path / "cache", tmp_path / "saved/cu129.toml"
    fill_cache(thin_channel, cache)
    make_driver(tmp_path / "driver", "12.2")
    variables = {**indexes.variables, "LD_LIBRARY_PATH": str(tmp_path / "driver")}

    def run(*options: object, **more: str) -> str:
        done = small_build.build(cache, tmp_path / "models", "--profile", "cuda", *options, **{**variables, **more})
        assert done.returncode == 0, done.stderr
        return done.stderr

    told = run("--spec", spec_file, "--dry-run")
    assert "runs CUDA up to 12.2, and this environment is for CUDA 13.0." in told
    assert "Build it with ./gen_vllm_env.sh --cuda 12.9, or update the driver to 580.65 or newer." in told
    saved.parent.mkdir()
    told = run("--spec", spec_file, "--cuda", "12.9", "--wheel-index", indexes.vllm, "--save", saved)
    assert "runs CUDA up to" not in told
    manifest = json.loads((tmp_path / "models/vllm/vllm_env.json").read_text())
    assert manifest["vllm"]["version"] == "0.99.0+cu129"
    assert manifest["vllm"]["origin"] == f"release, {indexes.vllm}/0.99.0/cu129"
    assert manifest["spec"]["torch_backend"] == "cu129"
    assert "nvidia-cutlass-dsl-libs-cu13" in manifest["spec"]["drop"]
    assert read_pylock(saved.with_name("pylock.cu129-cuda.toml")).inputs.pin == "vllm==0.99.0+cu129"


def test_a_build_that_would_be_served_ends_on_an_old_driver(
    indexes: CudaIndexes, thin_channel: Path, spec_file: Path, tmp_path: Path
) -> None:
    """Before anything is packed, and with both ways out. Without a GPU, only the profile ``cpu`` is served after its build."""
    spec_file.write_text(SPEC.replace("[profile.cuda]", "[profile.cpu]"))
    cache, models = tmp_path / "cache", tmp_path / "models"
    fill_cache(thin_channel, cache)
    make_driver(tmp_path / "driver", "12.2")
    argv = small_build.command(models, "--spec", spec_file, smoke=True)
    variables = {**indexes.variables, "LD_LIBRARY_PATH": str(tmp_path / "driver")}
    done = subprocess.run(
        argv, env=small_build.environment(cache, **variables), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 1, done.stderr
    assert "runs CUDA up to 12.2, and this environment is for CUDA 13.0." in done.stderr
    assert "./gen_vllm_env.sh --cuda 12.9" in done.stderr
    assert "To build it for another machine: --no-smoke-run." in done.stderr
    assert not models.exists()
