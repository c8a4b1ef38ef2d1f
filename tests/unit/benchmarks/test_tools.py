"""Benchmarks start with any python3 of a checkout that has its own tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def test_python_without_tritonclient_uses_the_tools_environment(tmp_path: Path) -> None:
    """Of several the newest that works."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    shutil.copytree(BENCHMARKS, tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("venv", "venv-3.99"):
        (tmp_path / ".tools" / name / "bin").mkdir(parents=True)
    (tmp_path / ".tools/venv/bin/python").symlink_to("/nonexistent/python3")
    working = tmp_path / ".tools/venv-3.99/bin/python"
    working.write_text(f'#!/bin/sh\necho tools >&2\nexec {sys.executable} "$@"\n')
    working.chmod(0o755)
    older = tmp_path / ".tools/venv-3.98/bin/python"
    older.parent.mkdir(parents=True)
    older.write_text("#!/bin/sh\necho older >&2\n")
    older.chmod(0o755)
    os.utime(older, (1, 1))
    argv = [bare / "bin/python", tmp_path / "benchmarks/soak.py", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == "tools\n"
    assert done.returncode == 0
    assert "usage: " in done.stdout


def test_instances_are_set_in_the_models_own_configuration(tmp_path: Path) -> None:
    """What `--instances` does to a copy of the repository's model; another file is not taken for one."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from harness.servers import set_instances  # its folder is no package of the checkout
    finally:
        sys.path.remove(str(BENCHMARKS))
    config = tmp_path / "config.pbtxt"
    shutil.copy(BENCHMARKS.parent / "model_repository" / "vllm" / "config.pbtxt", config)
    before = config.read_text()
    set_instances(config, 4)
    assert config.read_text() == before.replace("count: 1", "count: 4")
    config.write_text("")
    with pytest.raises(ValueError, match="no instance group"):
        set_instances(config, 4)


def test_servers_are_stopped_whoever_ends_a_benchmark(tmp_path: Path) -> None:
    """`timeout` sends SIGTERM to the process and to its group: the second one does not interrupt the stopping."""
    script = """
import time
from harness.processes import exit_on_sigterm
exit_on_sigterm()
try:
    print("running", flush=True)
    time.sleep(600)
finally:
    print("stopping", flush=True)
    input()
    print("stopped", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=BENCHMARKS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "running\n"
        process.terminate()
        assert process.stdout.readline() == "stopping\n"
        process.terminate()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "stopped\n"
    assert process.returncode == 143
