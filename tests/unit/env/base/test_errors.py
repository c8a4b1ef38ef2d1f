"""The errors: the parts that a user reads; test_main.py has the exit codes, test_parser.py the near words."""

from __future__ import annotations

from vllm_env.base.errors import VllmEnvError


def test_a_user_reads_what_failed_why_and_what_to_do() -> None:
    """A line each; a part that is not there has none."""
    error = VllmEnvError("It failed.", cause="The disk is full.", remedy="Free some space.")
    assert error.lines() == ["error: It failed.", "  why: The disk is full.", "  fix: Free some space."]
    assert VllmEnvError("It failed.").lines() == ["error: It failed."]
    assert str(error) == "It failed. The disk is full. Free some space."
