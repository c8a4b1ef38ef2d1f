"""The errors: the parts that a user reads, the exit codes, and the near words."""

from __future__ import annotations

import pytest

from vllm_env.base.errors import CommandError, UsageError, VllmEnvError, meant


def test_a_user_reads_what_failed_why_and_what_to_do() -> None:
    """A line each; a part that is not there has none."""
    error = VllmEnvError("It failed.", cause="The disk is full.", remedy="Free some space.")
    assert error.lines() == ["error: It failed.", "  why: The disk is full.", "  fix: Free some space."]
    assert VllmEnvError("It failed.").lines() == ["error: It failed."]
    assert str(error) == "It failed. The disk is full. Free some space."


@pytest.mark.parametrize(("kind", "code"), [(VllmEnvError, 1), (UsageError, 2), (CommandError, 1)])
def test_wrong_usage_has_an_exit_code_of_its_own(kind: type[VllmEnvError], code: int) -> None:
    """As the README says."""
    assert kind("x").exit_code == code
    assert issubclass(kind, VllmEnvError)


def test_a_program_leaves_its_last_lines() -> None:
    """They are no part of the message, which stays short."""
    error = CommandError("uv failed.", tail="line 1\nline 2")
    assert error.tail == "line 1\nline 2"
    assert error.lines() == ["error: uv failed."]


@pytest.mark.parametrize(("given", "remedy"), [("symbol", "Did you mean symbols?"), ("xyz", "There are: symbols, tests.")])
def test_the_near_word_is_named_else_all(given: str, remedy: str) -> None:
    """A list of two is short enough to be read."""
    assert meant(given, ["symbols", "tests"]) == remedy
