"""A server's log: the lines of a log that say why a server failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_env.serve.server_log import silent_seconds, telling_lines

if TYPE_CHECKING:
    from pathlib import Path


def test_error_lines_are_told_from_the_rest(tmp_path: Path) -> None:
    """glog errors and exceptions are kept in order; running messages and what every CPU machine logs are not."""
    log = tmp_path / "log"
    log.write_text(
        'E1120 10:00:00.0 1 server.cc:241] "CudaDriverHelper has not been initialized."\n'
        "I1120 10:00:00.0 1 model_lifecycle.cc:472] loading: vllm:1\n"
        'E1120 10:00:01.0 1 backend_model.cc:692] "ERROR: Failed to create instance"\n'
        "ValueError: no such model\n"
        "Error: Failed to initialize NVML\n"
    )
    assert [line.split()[0] for line in telling_lines(log).splitlines()] == ["E1120", "ValueError:"]


def test_log_without_errors_gives_its_last_lines(tmp_path: Path) -> None:
    """A log that names no error still helps."""
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    assert telling_lines(log, limit=2) == "line 98\nline 99"


def test_missing_log_is_no_error(tmp_path: Path) -> None:
    """A server that never started has no log; its failure is reported all the same."""
    assert telling_lines(tmp_path / "none") == ""
    assert silent_seconds(tmp_path / "none") == 0.0
