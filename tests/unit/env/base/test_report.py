"""What the user sees without a terminal."""

from __future__ import annotations

import contextvars
import re
import threading

import pytest

from vllm_env.base.report import Console


def test_a_stage_says_that_it_begins_and_how_long_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal: two plain lines on stderr, nothing on stdout, no escape codes."""
    console = Console()
    with console.stage("archive"):
        console.step("half", 0.5)
        console.step("673 MB")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"archive …\narchive +0\.\d s  673 MB\n", err)


def test_a_failed_stage_does_not_say_that_it_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    """No line with a time for a stage that did not end well."""
    with pytest.raises(ValueError, match="x"), Console().stage("lock"):
        raise ValueError("x")
    assert capsys.readouterr().err == "lock …\n"


def test_a_stage_within_a_stage_has_a_line_and_a_step_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """In a thread of its own, as the smoke run while the environment is checked."""
    console = Console()

    def inner() -> None:
        with console.stage("smoke run"):
            console.step("4 answers")

    with console.stage("verify"):
        console.step("rules")
        thread = threading.Thread(target=contextvars.copy_context().run, args=(inner,))
        thread.start()
        thread.join()
    assert re.fullmatch(
        r"verify …\nsmoke run …\nsmoke run +0\.\d s  4 answers\nverify +0\.\d s  rules\n", capsys.readouterr().err
    )


def test_quiet_leaves_errors_and_results(capsys: pytest.CaptureFixture[str]) -> None:
    """--quiet hides progress alone."""
    console = Console(quiet=True)
    with console.stage("lock"):
        console.note("a note")
    console.error("an error")
    console.result("a result")
    out, err = capsys.readouterr()
    assert (out, err) == ("a result\n", "an error\n")


def test_brackets_of_a_message_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    """[cpu] in a message is not markup, and a long line stays one line."""
    Console().error("vllm[cpu] " + "x" * 300)
    assert capsys.readouterr().err == "vllm[cpu] " + "x" * 300 + "\n"
