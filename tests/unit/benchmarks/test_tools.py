"""Benchmarks start with any python3 of a checkout that has its own tools."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_env.model.files import parse_config

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


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
