"""A server's log: the lines of a log that say why a server failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_env.serve.server_log import load_failure, silent_seconds, telling_lines

if TYPE_CHECKING:
    from pathlib import Path


def test_the_reason_of_a_failed_load_is_told_once(tmp_path: Path) -> None:
    """Of the last load, in one line, whichever way a release writes it; other lines are kept if the model did not say it."""
    log = tmp_path / "log"
    older = "E1120 1 model_lifecycle.cc:642] failed to load 'a' version 1: Internal: older\n"
    reason = r"Internal: Stub 'a_0' is\n\"not\" healthy.\n\nAt:\n x(1)\n"
    escaped = f"""E1120 1 model_lifecycle.cc:642] "failed to load 'a' version 1: {reason}\""""
    log.write_text(older)
    start = log.stat().st_size
    log.write_text(f"{older}ImportError: libx.so\n{escaped}\nerror: creating server\n")
    shown = """Internal: Stub 'a_0' is "not" healthy."""
    assert load_failure(log, start=start) == (shown, f"{older}ImportError: libx.so\nerror: creating server")
    log.write_text("E1120 failed to load 'a' version 1: Internal: ConfigError: no\n\nAt:\n  x(1): y\n")
    assert load_failure(log) == ("no", "")
    log.write_text("error: the disk is full\n")
    assert load_failure(log) == ("", "error: the disk is full")


def test_missing_log_is_no_error(tmp_path: Path) -> None:
    """A server that never started has no log; its failure is reported all the same."""
    assert telling_lines(tmp_path / "none") == ""
    assert silent_seconds(tmp_path / "none") == 0.0


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
