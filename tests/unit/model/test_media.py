"""Base64 media are decoded by vLLM's own loaders, and damaged ones refused by name."""

from __future__ import annotations

import base64

import pytest

from triton_vllm.errors import InvalidRequestError, UnsupportedError
from triton_vllm.inference.media import decode


def load(data):
    """A loader that knows one format."""
    if not data.startswith(b"IMG"):
        raise OSError("internal path /x")
    return data[3:]


def encoded(data):
    return base64.b64encode(data).decode()


def test_several_items_with_and_without_a_data_url_head():
    """Each element is one item, in order; line breaks inside base64 are allowed as MIME has them."""
    one = encoded(b"IMG1")
    items = (one, f"data:image/png;base64,{encoded(b'IMG2')}", one[:4] + "\n" + one[4:])
    assert decode({"image": items}, {"image": load}) == {"image": [b"1", b"2", b"1"]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("abc", "image[0] is not valid base64"),
        ("ä", "not valid base64"),
        (encoded(b"no"), "image[0] cannot be decoded"),
    ],
)
def test_bad_items_are_refused_without_internals(text, says):
    """The message names the element and hides what the decoder said."""
    with pytest.raises(InvalidRequestError) as caught:
        decode({"image": (text,)}, {"image": load})
    assert says in str(caught.value)
    assert "/x" not in str(caught.value)


def test_a_modality_that_vllm_lacks_is_unsupported():
    """Not every vLLM decodes everything."""
    with pytest.raises(UnsupportedError, match="video"):
        decode({"video": ("YQ==",)}, {"image": load})
