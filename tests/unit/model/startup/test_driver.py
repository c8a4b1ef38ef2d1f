"""A driver that is too old for the environment is refused before vLLM is imported."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from support.fake_driver import make_driver
from triton_vllm.base.errors import ConfigError
from triton_vllm.startup import driver

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of an environment's torch that names its CUDA version; torch itself cannot be imported."""
    folder = tmp_path / "packages/torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(driver, "_LIBRARY", str(make_driver(tmp_path / "driver", "12.2")))
    return folder / "version.py"


@pytest.mark.parametrize("line", ["cuda: Optional[str] = '13.0'", 'cuda = "13.0"'])
def test_an_environment_for_a_newer_cuda_version_is_refused(torch: Path, line: str) -> None:
    """In one sentence, with what to type; torch is not imported for it."""
    torch.write_text(f"__version__ = '2.14.0+cu130'\n{line}\nhip: Optional[str] = None\n")
    with pytest.raises(ConfigError, match=r"runs CUDA up to 12.2, and this environment is for CUDA 13.0. Build it with"):
        driver.check()


@pytest.mark.parametrize("line", ["cuda: Optional[str] = '12.9'", "cuda: Optional[str] = None", ""])
def test_another_environment_is_not(torch: Path, line: str) -> None:
    """Of CUDA 12, for a CPU, or with a file that nobody knows."""
    torch.write_text(f"{line}\n")
    driver.check()
    torch.unlink()
    driver.check()


def test_without_a_driver_there_is_nothing_to_compare(torch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM says that there is no GPU."""
    torch.write_text("cuda = '13.0'\n")
    monkeypatch.setattr(driver, "_LIBRARY", "libno_such_driver.so.1")
    driver.check()
