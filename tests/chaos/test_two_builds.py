"""Two builds at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.chaos_lab import Lab


def test_one_waits_and_both_end_well(thin_lab: Lab) -> None:
    """Two builds of different sets into one repository: one says that it waits, both succeed, the set is whole."""
    lab = thin_lab
    other = replace(lab, targets=list(reversed(lab.targets)))
    builds = [lab.start(), other.start()]
    assert [build.wait() for build in builds] == [0, 0], "\n".join(build.text() for build in builds)
    waits = [build.text().count("another build is running; waiting") for build in builds]
    assert sorted(waits) == [0, 1]
    assert lab.published()
    assert lab.stray_files() == []
    assert lab.stray_processes() == []
