"""SIGINT, SIGTERM and SIGKILL at each stage and at random moments of a real build."""

from __future__ import annotations

import random
import re
import signal
from typing import TYPE_CHECKING

import pytest

from support.chaos_lab import STAGES, Lab
from support.patience import pause, wait_for
from support.thin_builds import finished_lab

if TYPE_CHECKING:
    from pathlib import Path

# the rest of the table takes minutes: --slow
_QUICK = {
    ("SIGINT", "lock"),
    ("SIGTERM", "parts"),
    ("SIGKILL", "prefix"),
}
_CASES = [
    pytest.param(name, stage, marks=[] if (name, stage) in _QUICK else [pytest.mark.slow])
    for name in ("SIGINT", "SIGTERM", "SIGKILL")
    for stage in STAGES
]


@pytest.fixture(scope="module")
def lab(finished_place: Path, thin_wheels: Path, small_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A repository with a published set, and a cache that has the interpreter."""
    return finished_lab(finished_place, tmp_path_factory.mktemp("chaos"), small_wheel, thin_wheels)


@pytest.fixture(scope="module")
def lengths(finished_place: Path) -> dict[str, float]:
    """How many seconds each stage of a build takes here, as the first one says itself; later ones may be twice as fast."""
    said = re.findall(r"^(\w+) +([\d.]+) s ", finished_place.with_name("finished.txt").read_text(), re.MULTILINE)
    found = {stage: float(seconds) for stage, seconds in said}
    assert found.keys() >= set(STAGES)
    return found


def _interrupt(lab: Lab, number: signal.Signals, stage: str, delay: float) -> bool:
    """Interrupt a cold build and check all that must hold afterwards; return whether the stage was under way."""
    before = lab.published()
    lab.make_cold()
    build = lab.start()
    build.wait_for(f"{stage} …")
    pause(delay)
    status = build.signal(number)
    moment = f"{number.name} {delay:.2f} s into {stage}: status {status}\n{build.text()}"
    after = lab.published()  # whole, whatever happened
    if number is signal.SIGKILL:
        assert status in (-signal.SIGKILL, 0), moment
    else:
        assert status in (130, 0), moment
        assert lab.stray_files() == [], moment
        assert "Traceback" not in build.text(), moment
    if status != 0 and "publish …" not in build.text():
        assert after == before, moment
    wait_for(lambda: not lab.stray_processes(), lambda: f"the end of {lab.stray_processes()}, {moment}")
    return status != 0 and re.findall(r"^(\w+) …", build.text(), re.MULTILINE)[-1] == stage


@pytest.mark.parametrize(("name", "stage"), _CASES)
def test_a_stage_is_interrupted(lab: Lab, lengths: dict[str, float], name: str, stage: str) -> None:
    """What stood there is whole; no stray process; no stray file but after SIGKILL; the next run ends well and tidies up."""
    longest = max(0.1, lengths[stage] / 2)
    while not _interrupt(lab, signal.Signals[name], stage, random.uniform(0, longest)):
        longest /= 2  # this machine has become faster
        assert longest > 0.001, "the stage ends before it can be interrupted"
    lab.finish()
    assert lab.stray_files() == []
    assert lab.stray_processes() == []


@pytest.mark.slow
def test_random_moments(lab: Lab, lengths: dict[str, float]) -> None:
    """Interrupts one after the other, each on what the one before left; after all of them a run ends well."""
    for _ in range(50):
        number = random.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
        _interrupt(lab, number, random.choice(STAGES), random.uniform(0, sum(lengths.values()) / 2))
    lab.finish()
    assert lab.stray_files() == []


@pytest.mark.slow
def test_a_second_interrupt_while_tidying_up(lab: Lab) -> None:
    """An impatient user presses Ctrl-C twice: the repository is whole all the same, and the next run ends well."""
    before = lab.published()
    lab.make_cold()
    build = lab.start()
    build.wait_for("prefix …")
    pause(1)
    build.child.send_signal(signal.SIGINT)
    pause(0.02)
    assert build.signal(signal.SIGINT) in (130, -signal.SIGINT, 1)
    assert lab.published() == before
    wait_for(lambda: not lab.stray_processes(), lambda: f"the end of {lab.stray_processes()}")
    lab.finish()
    assert lab.stray_files() == []
