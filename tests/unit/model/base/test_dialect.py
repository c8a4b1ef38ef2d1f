"""Errors in the words and with the codes of the official backend."""

from __future__ import annotations

import pytest

from triton_vllm.base import errors
from triton_vllm.base.dialect import OFFICIAL


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.InvalidRequestError("n must be smaller"), ("Error generating stream: n must be smaller", "INTERNAL")),
        (errors.InvalidRequestError("Error generating stream: When"), ("Error generating stream: When", "INTERNAL")),
        (errors.InvalidRequestError("LoRA feature is not enabled."), ("LoRA feature is not enabled.", "INTERNAL")),
        (errors.UnavailableError("try again later"), ("Error generating stream: try again later", "INTERNAL")),
        (errors.UnavailableError(errors.DEAD), (errors.DEAD, "UNAVAILABLE")),
        (errors.CancelledError("Request was cancelled"), ("Request was cancelled", "CANCELLED")),
    ],
)
def test_errors_are_answered_as_it_answers_them(error, expected):
    """Its code is INTERNAL unless the engine is dead or the client has gone."""
    assert OFFICIAL.error(error) == expected


def test_its_words_do_not_make_an_error_longer():
    """Than an error may be."""
    text, _ = OFFICIAL.error(errors.InvalidRequestError("x" * 500))
    assert text == "Error generating stream: " + "x" * 472 + "..."
