"""The lock's file: PEP 751, read by others too, and the same after it was read."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from packaging.pylock import Pylock

from support.small_build import small_lock
from vllm_env.lock.pylock import read_pylock, write_pylock

if TYPE_CHECKING:
    from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_TORCH = "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"


def test_a_lock_is_a_pylock_that_packaging_accepts(tmp_path: Path) -> None:
    """Names, versions, files, sizes and hashes stand where the standard has them; no registry is named."""
    lock = small_lock()
    write_pylock(lock, tmp_path / "pylock.toml")
    document = tomllib.loads((tmp_path / "pylock.toml").read_text())
    pylock = Pylock.from_dict(document)
    assert [(str(p.name), str(p.version)) for p in pylock.packages] == list(lock.versions().items())
    assert pylock.packages[0].wheels
    wheel = pylock.packages[0].wheels[0]
    assert (wheel.filename, wheel.size, wheel.hashes["sha256"]) == (lock.wheels[0].file, 18_000_000, "1" * 64)
    assert str(pylock.requires_python) == "==3.11.*"
    assert "http" not in (tmp_path / "pylock.toml").read_text()


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    """Inputs, wheels and the index of a build that only PyTorch's own index has; a pinned file is known by its name."""
    lock = small_lock()
    torch = dataclasses.replace(lock.wheels[0], name="torch", version="2.13.0+cpu", index="pytorch", file=_TORCH)
    lock = dataclasses.replace(lock, wheels=(*lock.wheels, torch))
    write_pylock(lock, tmp_path / "pylock.toml")
    found = read_pylock(tmp_path / "pylock.toml")
    assert found.inputs == lock.inputs
    by_name = {wheel.name: wheel for wheel in found.wheels}
    assert by_name["torch"] == torch
    assert by_name["vllm"].file == lock.wheels[2].file
    assert "/cache/wheels" not in (tmp_path / "pylock.toml").read_text()


def test_a_lock_that_is_a_link_stays_one(tmp_path: Path) -> None:
    """Several checkouts may share a lock; what it leads to is written."""
    lock = small_lock()
    (tmp_path / "shared.toml").touch()
    (tmp_path / "pylock.toml").symlink_to("shared.toml")
    write_pylock(lock, tmp_path / "pylock.toml")
    assert (tmp_path / "pylock.toml").is_symlink()
    assert read_pylock(tmp_path / "shared.toml") == read_pylock(tmp_path / "pylock.toml")
