"""The ways to serve: which servers they start, and what each of them is given."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def setting(tmp_path: Path) -> Any:
    from harness.servers import Setting

    return Setting(tmp_path / "env", tmp_path / "root", tmp_path / "models", {"model": "opt"}, {}, tmp_path)


def test_clients_share_one_server(setting: Any) -> None:
    """The server of the target that is named first, or one that is not a target itself."""
    from harness.targets import make_targets

    triton, http, stock, alone = make_targets(["triton", "triton-http", "triton-tritonclient", "official-http"], setting)
    assert [target.name for target in (triton, http, stock)] == ["triton", "triton-http", "triton-tritonclient"]
    assert http._served is triton is stock._served  # type: ignore[attr-defined]
    assert alone._served.name == "official"  # type: ignore[attr-defined]
    for name in ("trition", "triton-ftp", "openai-http"):
        with pytest.raises(ValueError, match="choose of engine, openai, triton"):
            make_targets([name], setting)


def test_the_official_backend_is_served_as_it_is(setting: Any, tmp_path: Path) -> None:
    """Its own files and the benchmark's engine arguments, with a stub for the environment's Python."""
    from dataclasses import replace

    from harness.targets import OfficialTarget

    source = tmp_path / "checkout" / "src"
    (source / "utils").mkdir(parents=True)
    (source / "model.py").write_text("import vllm\n")
    (source / "utils" / "metrics.py").write_text("\n")
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/python3.11").touch()
    stub = tmp_path / "root/python_backend_stubs/3.11/triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    stub.write_text("stub")
    model = OfficialTarget(replace(setting, official=tmp_path / "checkout")).prepare() / "vllm"
    assert (model / "1/model.py").read_text() == "import vllm\n"
    assert (model / "1/utils/metrics.py").exists()
    assert json.loads((model / "1/model.json").read_text()) == {"model": "opt"}
    assert (model / "triton_python_backend_stub").read_text() == "stub"
    assert f'"EXECUTION_ENV_PATH" value: {{ string_value: "{tmp_path / "env"}" }}' in (model / "config.pbtxt").read_text()
    assert 'backend: "python"' in (model / "config.pbtxt").read_text()


def test_vllms_server_is_told_how_many_tokens_a_piece_has(setting: Any) -> None:
    """By its own argument, under a name that says so; the other target keeps its own."""
    from harness.servers import as_flags
    from harness.targets import OpenAITarget

    merged, plain = OpenAITarget(setting, 5), OpenAITarget(setting)
    assert merged.name == "openai-interval-5"
    assert as_flags(merged.setting.arguments) == ["--model", "opt", "--stream-interval", "5"]
    assert (plain.name, as_flags(plain.setting.arguments)) == ("openai", ["--model", "opt"])
