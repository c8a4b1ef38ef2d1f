"""benchmarks/gpu.py: what it gives to the commands that it runs, and in which order."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from support.repositories import CHECKOUT

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


@pytest.mark.parametrize("status", [0, 1])
def test_the_environment_is_unpacked_before_the_measurements(
    gpu: Any, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """It refuses a folder that is not empty. Then nothing is measured."""
    called: list[list[str]] = []

    def unpack(command: list[Any], **_: object) -> Any:
        called.append(command[1:])
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(gpu.subprocess, "run", unpack)
    for benchmark in (gpu.cold_start, gpu.serving):
        monkeypatch.setattr(benchmark, "main", called.append)
    monkeypatch.setattr(gpu, "require_openai_client", lambda: None)
    given = [str(repository), "--work", str(tmp_path / "work")]
    assert (gpu.main(given) or 0) == status
    everything = list(gpu.commands(given))
    assert called == (everything[:1] if status else everything)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [(["--shape", "none"], "argument --shape: invalid choice"), (["--unknown"], "unrecognized arguments: --unknown")],
)
def test_wrong_arguments_are_found_before_anything_else(
    gpu: Any, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], says: str
) -> None:
    """The error names the argument."""
    with pytest.raises(SystemExit) as error:
        gpu.main([str(repository), "--work", str(tmp_path / "work"), *wrong])
    assert error.value.code == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_a_repository_without_a_model_is_refused(gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the folder and the remedy."""
    with pytest.raises(SystemExit):
        gpu.main([str(tmp_path)])
    assert f"{tmp_path} has no model vllm: build it with gen_vllm_env.sh" in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_refused(
    gpu: Any, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the measurement is for the processor."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(SystemExit):
        gpu.main([str(repository)])
    assert "this machine has no NVIDIA GPU" in capsys.readouterr().err
    assert gpu.commands([str(repository), "--device", "cpu"])


def test_a_missing_library_is_found_before_anything_else(repository: Path, tmp_path: Path) -> None:
    """The error names it."""
    code = "import sys; sys.modules['aiohttp'] = None; sys.path.insert(0, sys.argv[1]); import gpu; gpu.main(sys.argv[2:])"
    given = [str(CHECKOUT / "benchmarks"), str(repository), "--device", "cpu", "--work", str(tmp_path / "work")]
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot import aiohttp" in done.stderr
    assert not (tmp_path / "work").exists()
