"""The machines that environments are built on."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_env.base.errors import VllmEnvError
from vllm_env.base.machine import AMD64, ARM64, Platform, has_gpu, require_glibc, this_platform

_OTHERS = [("Linux", "ppc64le", "ppc64le"), ("Darwin", "arm64", "Darwin arm64"), ("Darwin", "x86_64", "Darwin x86_64")]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_a_driver_without_a_device_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi alone, as an image brings it, computes nothing."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not has_gpu()


@pytest.mark.parametrize(("system", "machine", "named"), _OTHERS)
def test_another_machine_is_named(system: str, machine: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is fetched for it."""
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(VllmEnvError, match=f"This machine is {named}") as caught:
        this_platform()
    assert caught.value.remedy


@pytest.mark.parametrize(("machine", "platform"), [("x86_64", AMD64), ("aarch64", ARM64)])
def test_two_kinds_of_machine_are_known(machine: str, platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names of the kernel."""
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert this_platform() == platform


@pytest.mark.parametrize("library", ["glibc 2.34", "glibc 2.9", None])
def test_an_older_c_library_is_named(library: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what needs a newer one, and with what to do; musl says nothing at all."""
    monkeypatch.setattr("os.confstr", lambda _: library)
    with pytest.raises(VllmEnvError, match=f"The wheel needs glibc 2.35 .* is {library or 'another than glibc'}") as caught:
        require_glibc(35, "The wheel", "Take a container.")
    assert caught.value.remedy == "Take a container."
