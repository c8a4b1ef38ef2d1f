"""benchmarks/gpu.py: what it gives to the commands that it runs, and in which order."""

from __future__ import annotations

import shutil
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return the benchmark on a machine with a GPU."""
    import gpu

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    return gpu


def test_both_benchmarks_measure_the_same_build(gpu: Any, repository: Path, tmp_path: Path) -> None:
    """The table uses the environment that is unpacked from the repository; each report has its own name."""
    import cold_start
    from harness import options

    places = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "h100")]
    given = [str(repository), "--triton-root", str(tmp_path), "--commit", "abc", *places]
    unpack, starts, table = gpu.commands(given)
    first = cold_start.parse(starts)
    second = options.parse(table, None)
    assert set(first.cases.values()) == {repository}
    assert unpack == ["unpack", str(second.environment), "--model-repository", str(repository)]
    assert second.model_repository == repository
    assert first.triton_root == second.triton_root == tmp_path
    assert first.commit == second.commit == "abc"
    assert (first.out.name, second.out.name) == ("h100_starts", "h100_serving")
    assert first.work != second.work


def test_the_table_has_two_front_ends_for_each_server_and_five_rounds(gpu: Any, repository: Path) -> None:
    """It has the streams of the README's table. An option of the user replaces ours."""
    from harness import options

    _, _, table = gpu.commands([str(repository)])
    found = options.parse(table, None)
    assert (found.device, found.instances, found.rounds, found.targets) == ("gpu", 2, 5, ["openai", "triton"])
    assert sorted(found.in_flight) == [1, 8, 32, 256]
    _, _, table = gpu.commands([str(repository), "--device", "cpu", "--rounds", "1"])
    found = options.parse(table, None)
    assert (found.device, found.instances, found.rounds) == ("cpu", 2, 1)
