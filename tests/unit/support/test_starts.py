"""The record of what a run starts."""

from __future__ import annotations

from support.once import RUN
from support.starts import IN_PROCESS, TRITON, note_start, summary


def test_starts_are_counted_by_kind(tmp_path, monkeypatch):
    """With the test that needed each; no line where nothing was started."""
    monkeypatch.setenv(RUN, str(tmp_path))
    assert summary(tmp_path) == ""
    for engine in (True, False, True):
        note_start(TRITON, {"max_num_seqs": 2}, engine=engine)
    note_start(IN_PROCESS)
    assert summary(tmp_path) == "server starts: 3 tritonserver (1 without an engine), 1 engine in process"
    first = (tmp_path / "starts.txt").read_text().splitlines()[0].split("\t")
    assert first[2].endswith("test_starts.py::test_starts_are_counted_by_kind")
    assert first[3] == '{"max_num_seqs": 2}'
