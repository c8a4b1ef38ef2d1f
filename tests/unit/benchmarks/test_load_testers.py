"""The comparison of two load testers; the server that they measure is the real one only in a run."""

from __future__ import annotations

import importlib
import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def load_testers() -> Any:
    """The program as a module."""
    return importlib.import_module("load_testers")


def test_both_are_asked_for_the_same(load_testers: Any, tmp_path: Path) -> None:
    """The same prompts, lengths and load; each reads them in its own form."""
    server: Any = SimpleNamespace(port=8000, setting=SimpleNamespace(environment=tmp_path, arguments={"model": "m"}))
    measured = load_testers.Measured(server, tmp_path, 100)
    load, prompts, report = load_testers.LOADS["open"], ["w4 w5", "w6"], tmp_path / "report.json"
    ours = measured._ours(load, prompts, report, 7)
    theirs = measured._theirs(load, prompts, report, 7)
    for argv in (ours, theirs):
        assert argv[-2:] == ["--request-rate", "8"]
        assert "--seed=7" in argv
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    assert {line["parameters"]["max_tokens"] for line in lines} == {64}
    talks = json.loads((tmp_path / "prompts.json").read_text())
    assert [talk["conversations"][0]["value"] for talk in talks] == prompts
    assert {"--sharegpt-output-len=64", "--ignore-eos", "--num-prompts=72"} <= {*theirs}


def test_the_table_divides_our_median_by_theirs(load_testers: Any) -> None:
    """With the range of each."""
    figures = dict.fromkeys(load_testers._FIGURES, 10.0)
    blocks = [
        load_testers.Block("open", client, number, {**figures, "median_ttft_ms": value})
        for client, values in ((load_testers._OURS, (1.0, 9.0, 4.0)), (load_testers._THEIRS, (5.0, 5.0, 5.0)))
        for number, value in enumerate(values)
    ]
    table = load_testers.table(blocks)
    assert "| median TTFT, ms | 4.00 (1.00-9.00) | 5.00 (5.00-5.00) | 0.800 |" in table
    assert "| output tokens/s | 10 (10-10) | 10 (10-10) | 1.000 |" in table


def test_without_aiohttp_no_server_is_started(load_testers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start would take a minute."""
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "loadtest.openai", raising=False)
    with pytest.raises(SystemExit, match="aiohttp"):
        load_testers.main(["--environment", "missing"])
