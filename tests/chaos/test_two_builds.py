"""Two builds at once."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from support import small_build
from support.chaos_lab import Lab

if TYPE_CHECKING:
    from pathlib import Path

    from support.small_fixtures import Channel


@pytest.fixture
def lab(channel: Channel, small_wheel: Path, tmp_path: Path) -> Lab:
    """An empty repository and a cache that has the interpreter."""
    shutil.copytree(channel.root / "conda/channel", tmp_path / "cache/conda/channel")
    return Lab(tmp_path, small_build.make_spec(tmp_path / "spec", small_wheel))


def test_one_waits_and_both_end_well(lab: Lab) -> None:
    """Two builds of different sets into one repository: one says that it waits, both succeed, the set is whole."""
    other = replace(lab, targets=list(reversed(lab.targets)))
    builds = [lab.start(), other.start()]
    assert [build.wait() for build in builds] == [0, 0], "\n".join(build.text() for build in builds)
    waits = [build.text().count("another build is running; waiting") for build in builds]
    assert sorted(waits) == [0, 1]
    assert lab.published()
    assert lab.stray_files() == []
    assert lab.stray_processes() == []
