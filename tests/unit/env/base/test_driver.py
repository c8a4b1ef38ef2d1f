"""What the NVIDIA driver runs, and the sentence about one that is too old."""

from __future__ import annotations

import itertools
import shutil
from typing import TYPE_CHECKING

import pytest

from support.fake_driver import LIBRARY, make_driver
from triton_vllm.startup import driver as at_load
from vllm_env.base import driver

if TYPE_CHECKING:
    from pathlib import Path

_OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@h)\nGCC version:  gcc 12.2.0\n"
_CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"


def test_the_drivers_library_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, or with one that only stands in for it, nothing is known; at load it is asked the same way."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    def answers(folder: Path) -> set[str]:
        # A process loads a library once, so each has a path of its own.
        monkeypatch.setattr(at_load, "_LIBRARY", str(folder / LIBRARY))
        shutil.copy(folder / LIBRARY, tmp_path)
        return {driver.cuda_of_driver(), at_load._cuda_of_driver()}

    (tmp_path / "text").mkdir()
    (tmp_path / "text" / LIBRARY).write_text("no library")
    assert answers(tmp_path / "text") == {""}
    for cuda, known in (("12.2", "12.2"), ("13.0", "13.0"), ("0.0", "")):
        assert answers(make_driver(tmp_path / cuda, cuda).parent) == {known}


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
    """The remedy has what can be typed, if anything helps but another driver."""
    said = driver.complaint(runs, "535.1", cuda)
    assert said[1] == remedy
    assert bool(said[0]) == bool(remedy)


def test_the_load_says_the_same_as_the_build() -> None:
    """For each version of CUDA that either of them knows, and of a driver that is known or not."""
    assert at_load._FIRST_DRIVERS == driver._FIRST_DRIVERS
    assert at_load._OLDER_CUDA == driver._OLDER_CUDA
    versions = ["", *(f"{major}.{minor}" for major in (10, *driver._FIRST_DRIVERS, 99) for minor in (0, 9))]
    for runs, cuda, number in itertools.product(versions, versions, ("", "535.1")):
        assert at_load.complaint(runs, number, cuda) == driver.complaint(runs, number, cuda)
