"""What the NVIDIA driver runs, and the sentence about one that is too old."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.fake_driver import make_driver
from triton_vllm.startup import driver as at_load
from vllm_env.base import driver

if TYPE_CHECKING:
    from pathlib import Path

_OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@h)\nGCC version:  gcc 12.2.0\n"
_CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"


def test_the_drivers_library_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, or with one that only stands in for it, nothing is known."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    (tmp_path / "libcuda.so.1").write_text("no library")
    assert driver.cuda_of_driver() == ""
    make_driver(tmp_path, "12.2")
    assert driver.cuda_of_driver() == "12.2"
    make_driver(tmp_path, "0.0")
    assert driver.cuda_of_driver() == ""


@pytest.mark.parametrize(("text", "version"), [(_OPEN, "580.95.05"), (_CLOSED, "535.183.01"), ("something else", "")])
def test_the_kernel_module_has_the_drivers_version(
    text: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both modules write their own line; at load it is read the same way."""
    for module in (driver, at_load):
        monkeypatch.setattr(module, "_VERSION_FILE", tmp_path / "version")
    assert driver.driver_version() == at_load._driver_version() == ""
    (tmp_path / "version").write_text(text)
    assert driver.driver_version() == at_load._driver_version() == version


@pytest.mark.parametrize(
    ("runs", "cuda", "remedy"),
    [
        ("12.2", "13.0", "Build it with ./gen_vllm_env.sh --cuda 12.9, or update the driver to 580.65 or newer."),
        ("11.4", "12.9", "Update the driver to 525.60 or newer."),
        ("13.1", "14.0", "Build it with ./gen_vllm_env.sh --cuda 12.9, or update the driver."),
        ("12.2", "12.9", ""),
        ("13.0", "12.9", ""),
        ("", "13.0", ""),
        ("12.2", "", ""),
    ],
)
def test_a_driver_runs_every_version_of_its_own_major_one(runs: str, cuda: str, remedy: str) -> None:
    """The remedy has what can be typed, if anything helps but another driver; the load says the same as the build."""
    said = driver.complaint(runs, "535.1", cuda)
    assert said[1] == remedy
    assert bool(said[0]) == bool(remedy)
    assert at_load.complaint(runs, "535.1", cuda) == said
