"""The compressors: which bytes they make."""

from __future__ import annotations

import gzip
import hashlib

import pytest
import zstandard

from vllm_env.export.compression import COMPRESSIONS
from vllm_env.layout.tar import CHUNK_BYTES

DATA = b"".join(hashlib.sha256(b"%d" % (i // 3)).digest() + b"text" * (i % 9) for i in range(120_000))
CHUNKS = [DATA[start : start + CHUNK_BYTES] for start in range(0, len(DATA), CHUNK_BYTES)]


@pytest.mark.parametrize(("name", "digest"), [("gzip", "906c48033b448d16"), ("zstd", "13621c4b48f8c08f")])
def test_the_bytes_are_those_of_the_pinned_compressor(name: str, digest: str) -> None:
    """If a newer version in env/requirements.txt makes others, every layer in a registry changes once: then write it here."""
    assert len(CHUNKS) > 1
    compressed = b"".join(COMPRESSIONS[name].compress(CHUNKS))
    reader = zstandard.ZstdDecompressor().decompressobj()
    assert (gzip.decompress(compressed) if name == "gzip" else reader.decompress(compressed)) == DATA
    assert hashlib.sha256(compressed).hexdigest()[:16] == digest


def test_an_empty_layer_is_a_whole_member() -> None:
    """The ends are there, also without data."""
    assert gzip.decompress(b"".join(COMPRESSIONS["gzip"].compress([]))) == b""
