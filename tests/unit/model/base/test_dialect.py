"""Errors in the words and with the codes of the official backend."""

from __future__ import annotations

from triton_vllm.base import errors
from triton_vllm.base.dialect import OFFICIAL


def test_its_words_do_not_make_an_error_longer():
    """Than an error may be."""
    text, _ = OFFICIAL.error(errors.InvalidRequestError("x" * 500))
    assert text == "Error generating stream: " + "x" * 472 + "..."
