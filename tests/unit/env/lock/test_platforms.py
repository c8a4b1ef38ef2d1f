"""Locks for two kinds of machine: what was there for x86-64 stays as it is, byte by byte."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from packaging.utils import parse_wheel_filename

from support.small_build import small_lock
from vllm_env.base.cache import key_of
from vllm_env.base.errors import UsageError
from vllm_env.base.machine import AMD64, ARM64, PLATFORMS, this_platform
from vllm_env.interpreter.layer import LOCAL_CHANNEL, CondaLayer
from vllm_env.lock.lock import inputs_of, lock_beside
from vllm_env.lock.pins import PinnedVllm, resolve_pin
from vllm_env.lock.platforms import pip_options, platform_tags, tags_of
from vllm_env.lock.pylock import Lock, read_pylock, write_pylock
from vllm_env.lock.resolve import _tags
from vllm_env.lock.spec import DEFAULT_SPEC, Overrides, Pin, load_spec

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_the_committed_lock_is_written_as_it_is(profile: str, tmp_path: Path) -> None:
    """For x86-64, without a word of the platform; its inputs, and so its place in the cache, stay."""
    file = lock_beside(DEFAULT_SPEC, profile, AMD64)
    assert file.name == f"pylock.vllm_env-{profile}.toml"
    old = read_pylock(file)
    spec = load_spec(profile, Overrides(), platform=AMD64.name)
    pinned = PinnedVllm(f"{spec.distribution}=={spec.pin.value}", origin="release")
    lock = Lock(spec, pinned, CondaLayer(LOCAL_CHANNEL, ()), old.wheels, inputs_of(spec, pinned))
    write_pylock(lock, tmp_path / "pylock.toml")
    assert (tmp_path / "pylock.toml").read_bytes() == file.read_bytes()
    assert "platform" not in lock.inputs.document()
    arm = replace(lock.inputs, platform=ARM64.name)
    assert key_of(arm.document()) != key_of(lock.inputs.document())


def test_each_platform_has_a_lock_of_its_own(tmp_path: Path) -> None:
    """Next to the same spec; the one for the other machine is told apart by its inputs, too."""
    assert lock_beside(tmp_path / "a.toml", "cuda", ARM64).name == "pylock.a-cuda-arm64.toml"
    amd64 = small_lock().inputs
    arm = replace(amd64, platform=ARM64.name)
    assert arm.drift(amd64) == "platform was 'linux/arm64' and is 'linux/amd64'"


def test_a_spec_is_for_machines_like_this_one_unless_told() -> None:
    """No spec file has the platform."""
    assert load_spec("cpu", Overrides()).target == this_platform()
    spec = load_spec("cpu", Overrides(), platform="linux/arm64")
    assert spec.target == ARM64
    assert spec.is_default


@pytest.mark.parametrize("platform", PLATFORMS.values())
def test_a_wheel_fits_its_own_platform(platform) -> None:
    """And one without compiled files fits both."""
    tags = set(_tags("3.12", 28, platform))
    for machine in ("x86_64", "aarch64"):
        _, _, _, wheel = parse_wheel_filename(f"demo-1.0-cp312-cp312-manylinux_2_28_{machine}.whl")
        assert bool(tags & wheel) is (machine == platform.machine)
    assert tags & parse_wheel_filename("demo-1.0-py3-none-any.whl")[3]


def test_pip_is_told_of_another_platform_only() -> None:
    """By the tags of the files that it is to fetch."""
    files = ["a-1-py3-none-any.whl", "b-1-cp312-cp312-manylinux2014_aarch64.manylinux_2_17_aarch64.whl"]
    assert tags_of(files) == ["manylinux2014_aarch64", "manylinux_2_17_aarch64"]
    assert pip_options(this_platform(), tags_of(files)) == []
    other = next(platform for platform in PLATFORMS.values() if platform != this_platform())
    assert pip_options(other, tags_of(files)) == [
        "--platform",
        "manylinux2014_aarch64",
        "--platform",
        "manylinux_2_17_aarch64",
    ]
    assert platform_tags(17, ARM64)[0] == "manylinux_2_17_aarch64"


def test_nothing_is_compiled_for_another_platform(small_tree: Path, small_cache: Path) -> None:
    """The wheel would be for this one."""
    from support.small_fixtures import workspace_in

    other = next(platform for platform in PLATFORMS.values() if platform != this_platform())
    spec = load_spec("cpu", Overrides(pin=Pin("source", str(small_tree))), platform=other.name)
    with pytest.raises(UsageError, match=f"this machine cannot build a wheel for {other.name}"):
        resolve_pin(workspace_in(small_cache), spec)
