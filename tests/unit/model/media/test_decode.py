"""Base64 media are decoded by vLLM's own loaders, and damaged ones refused by name."""

from __future__ import annotations

import base64

import pytest

from triton_vllm.base.errors import InvalidRequestError, UnsupportedError
from triton_vllm.media.decode import check_within, decode, videos_within


def load(data):
    """A loader that knows one format."""
    if not data.startswith(b"IMG"):
        raise OSError("internal path /x")
    return data[3:]


def unmeasured(files):
    """Let every file pass."""


def encoded(data):
    return base64.b64encode(data).decode()


def test_several_items_with_and_without_a_data_url_head():
    """Each element is one item, in order; line breaks inside base64 are allowed as MIME has them."""
    one = encoded(b"IMG1")
    items = (one, f"data:image/png;base64,{encoded(b'IMG2')}", one[:4] + "\n" + one[4:])
    assert decode({"image": items}, {"image": load}, unmeasured) == {"image": [b"1", b"2", b"1"]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("abc", "image[0] is not valid base64"),
        ("Y!Q==", "image[0] is not valid base64"),
        ("ä", "not valid base64"),
        (encoded(b"no"), "image[0] cannot be decoded"),
    ],
)
def test_bad_items_are_refused_without_internals(text, says):
    """The message names the element and hides what the decoder said."""
    with pytest.raises(InvalidRequestError) as caught:
        decode({"image": (text,)}, {"image": load}, unmeasured)
    assert says in str(caught.value)
    assert "/x" not in str(caught.value)


def test_a_modality_that_vllm_lacks_is_unsupported():
    """Not every vLLM decodes everything."""
    with pytest.raises(UnsupportedError, match="video"):
        decode({"video": ("YQ==",)}, {"image": load}, unmeasured)


def test_videos_are_checked_before_anything_is_decoded():
    """All of a request at once, by the name that the client knows; a refusal ends it there."""
    seen = []

    def check(videos):
        seen.extend(videos)
        raise InvalidRequestError("too long")

    def forbidden(data):
        pytest.fail(f"decoded {data}")

    given = {"image": (encoded(b"IMG"),), "video": (encoded(b"one"), f"data:video/mp4;base64,{encoded(b'two')}")}
    with pytest.raises(InvalidRequestError, match="too long"):
        decode(given, {"image": forbidden, "video": forbidden}, check)
    assert seen == [("video[0]", b"one"), ("video[1]", b"two")]


def test_what_vllm_refuses_as_too_large_keeps_its_number():
    """Not "damaged": the client can send less. What the operator could set is not the client's."""

    def refuse(data):
        raise ValueError(
            "Audio exceeds maximum allowed duration of 600s (decoded 9 samples). Set VLLM_A_S to increase this limit."
        )

    with pytest.raises(InvalidRequestError) as caught:
        decode({"audio": ("YQ==",)}, {"audio": refuse}, unmeasured)
    assert str(caught.value) == "audio[0] cannot be decoded: Audio exceeds maximum allowed duration of 600s (decoded 9 samples)"


def test_a_decoder_that_is_not_installed_is_no_damage():
    """vLLM's audio libraries are an extra of its wheel."""

    def missing(data):
        raise ImportError("Please install vllm[audio]")

    with pytest.raises(UnsupportedError, match=r"audio\[0\] cannot be decoded: .* the model's environment has no decoder"):
        decode({"audio": ("YQ==",)}, {"audio": missing}, unmeasured)


@pytest.mark.parametrize("spelled", ["data:video/mp4;base64,", "DATA:;base64,"])
def test_videos_are_found_in_messages(spelled):
    """Whether the address stands in an object or alone; texts, pictures and what is fetched are passed over."""
    film = spelled + encoded(b"film")
    parts = ["a", {"type": "text", "text": "b"}, {"video_url": film}, {"video_url": {"url": film}}, {"image_url": {"url": film}}]
    found = videos_within([{"role": "user", "content": "c"}, {"role": "user"}, {"content": [*parts, {"video_url": "http://d"}]}])
    seen: list[tuple[str, bytes]] = []
    check_within(found, seen.extend)
    assert seen == [(f"messages[2].content[{place}].video_url", b"film") for place in (2, 3)]
