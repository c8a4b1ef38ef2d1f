"""Benchmarks start with any python3 of a checkout that has its own tools."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from vllm_env.model.files import parse_config

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def test_python_without_tritonclient_uses_the_tools_environment(tmp_path: Path) -> None:
    """Of several the newest that works."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    for name in ("benchmarks", "client"):
        shutil.copytree(BENCHMARKS.parent / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("venv", "venv-3.99"):
        (tmp_path / ".tools" / name / "bin").mkdir(parents=True)
    (tmp_path / ".tools/venv/bin/python").symlink_to("/nonexistent/python3")
    working = tmp_path / ".tools/venv-3.99/bin/python"
    working.write_text(f'#!/bin/sh\necho tools >&2\nexec "{sys.executable}" "$@"\n')
    working.chmod(0o755)
    older = tmp_path / ".tools/venv-3.98/bin/python"
    older.parent.mkdir(parents=True)
    older.write_text("#!/bin/sh\necho older >&2\n")
    older.chmod(0o755)
    os.utime(older, (1, 1))
    argv: list[str | Path] = [bare / "bin/python", tmp_path / "benchmarks/packing.py", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == "tools\n"
    assert done.returncode == 0
    assert "usage: " in done.stdout


def test_the_model_is_served_as_the_benchmark_wants_it(tmp_path: Path) -> None:
    """A copy of the repository's model with the run's environment, engine arguments, instances and a stub for its Python."""
    from harness.servers import Setting, place_model

    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/python3.11").touch()
    stub = tmp_path / "root/python_backend_stubs/3.11/triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    stub.write_text("stub")
    source = BENCHMARKS.parent / "model_repository" / "vllm"
    setting = Setting(
        environment=tmp_path / "env",
        triton_root=tmp_path / "root",
        model_repository=source.parent,
        arguments={"model": "opt"},
        variables={},
        work=tmp_path,
        instances=4,
    )
    model = place_model(setting, tmp_path / "store" / "vllm", {"OPENAI_PORT": "9000"}) / "vllm"
    config = parse_config(model / "config.pbtxt", (model / "config.pbtxt").read_text())
    expected = parse_config(source / "config.pbtxt", (source / "config.pbtxt").read_text())
    expected.parameters["EXECUTION_ENV_PATH"].string_value = str(tmp_path / "env")
    expected.parameters["OPENAI_PORT"].string_value = "9000"
    expected.instance_group[0].count = 4
    assert config == expected
    assert json.loads((model / "vllm_engine_args.json").read_text()) == {"model": "opt"}
    assert (model / "triton_python_backend_stub").read_text() == "stub"
    assert (model / "1/model.py").exists()


def test_vllms_server_is_given_the_engine_arguments() -> None:
    """As its command line has them."""
    from harness.servers import as_flags

    arguments = {"model": "opt", "enforce_eager": True, "enable_prefix_caching": False, "compilation_config": {"level": 3}}
    assert as_flags(arguments) == [
        *("--model", "opt", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--compilation-config", '{"level": 3}'),
    ]


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
