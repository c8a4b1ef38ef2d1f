"""What a client reads is short and tells nothing of the server."""

from __future__ import annotations

import pytest

from triton_vllm.base.errors import LONGEST_TEXT, InvalidRequestError, UnavailableError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("max_tokens must be at least 1, got -1.", None),
        ("image/png and text/plain, 3/4, https://example.com/a/b", None),
        ("data:image/png;base64,abc/def", None),
        ("No such file: '/root/models/secret/config.json'", "No such file: '…'"),
        ("in /usr/lib/python3.11/site-packages/vllm/x.py, line 3", "in …, line 3"),
        ("<PIL.Image at 0x7f3a1c0de0>", "<PIL.Image at …>"),
        ("token 0x41", None),
        ("", None),
    ],
)
def test_paths_and_addresses_are_left_out(text, shown):
    """Of the server; what only looks like them stays."""
    assert str(InvalidRequestError(text)) == (text if shown is None else shown)


def test_a_long_text_is_cut():
    """vLLM repeats what it was given, however long that is."""
    text = str(UnavailableError("x" * 50_000_000))
    assert len(text) == LONGEST_TEXT
    assert text.endswith("x...")
    assert str(UnavailableError("y" * LONGEST_TEXT)) == "y" * LONGEST_TEXT
