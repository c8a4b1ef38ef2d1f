"""Write an OCI image layout: blobs, configuration, manifest and index (image-spec 1.1)."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_env.layout.tar import CHUNK_BYTES, read_chunk

from .compression import Compression
from .layers import Layer

INDEX = "index.json"
"""The file that makes a folder an image layout."""
_MEDIA = "application/vnd.oci.image"
_BLOBS = "blobs/sha256"


@dataclass(frozen=True)
class WrittenLayer:
    """A layer in the image's folder.

    Attributes:
        name: its name for people.
        digest: ``sha256:…`` of the compressed bytes, which registries know.
        size: compressed bytes.
        contents_digest: ``sha256:…`` of the tar archive.
    """

    name: str
    digest: str
    size: int
    contents_digest: str


class _Source:
    """The tar archive of a layer while it is read: the digest and the bytes so far."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.digest = hashlib.sha256()
        self.done = 0

    def chunks(self) -> Iterator[bytes]:
        """Yield the archive's bytes."""
        buffer = memoryview(bytearray(CHUNK_BYTES))
        # chunks() only describes them. read_chunk() reads the files.
        for chunk in self.layer.tar.chunks():
            data = bytes(read_chunk(chunk, buffer))
            self.digest.update(data)
            self.done += len(data)
            yield data


@dataclass
class Image:
    """An image that is being written into an empty folder.

    Attributes:
        folder: the folder.
        compression: how layers are compressed.
        labels: the labels of the configuration, also annotations of the manifest.
        created: time of creation (RFC 3339).
        platform: the machines that it is for, such as ``linux/amd64``.
        layers: the written layers.
    """

    folder: Path
    compression: Compression
    labels: dict[str, str]
    created: str
    platform: str
    layers: list[WrittenLayer] = field(default_factory=list)

    def add(self, layer: Layer) -> Iterator[int]:
        """Write a layer, and yield the number of uncompressed bytes that are done.

        Only a caller that takes all of them gets the layer.
        """
        blobs = self.folder / _BLOBS
        blobs.mkdir(parents=True, exist_ok=True)
        source = _Source(layer)
        digest = hashlib.sha256()
        # A blob's name is its digest, which is known at the end.
        unfinished = blobs / "unfinished"
        with unfinished.open("wb") as sink:
            for data in self.compression.compress(source.chunks()):
                sink.write(data)
                digest.update(data)
                yield source.done
        self.layers.append(
            WrittenLayer(
                name=layer.name,
                digest=f"sha256:{digest.hexdigest()}",
                size=unfinished.stat().st_size,
                contents_digest=f"sha256:{source.digest.hexdigest()}",
            )
        )
        unfinished.rename(blobs / digest.hexdigest())

    def _platform(self) -> dict[str, str]:
        """Return the platform as the specification has it: ``linux`` and ``amd64`` apart."""
        system, _, architecture = self.platform.partition("/")
        return {"architecture": architecture, "os": system}

    def finish(self, tag: str) -> str:
        """Write the configuration, the manifest and the index; return the manifest's digest.

        A registry knows the image by this digest.
        """
        config = {
            **self._platform(),
            "created": self.created,
            "config": {"Labels": self.labels},
            "rootfs": {
                "type": "layers",
                "diff_ids": [layer.contents_digest for layer in self.layers],
            },
            "history": [
                {"created": self.created, "created_by": f"vllm-env export: {layer.name}"}
                for layer in self.layers
            ],
        }
        layer_type = f"{_MEDIA}.layer.v1.{self.compression.media_type}"
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{_MEDIA}.manifest.v1+json",
            "config": self._write_blob(f"{_MEDIA}.config.v1+json", config),
            "layers": [
                {"mediaType": layer_type, "digest": layer.digest, "size": layer.size}
                for layer in self.layers
            ],
            "annotations": self.labels,
        }
        described = self._write_blob(f"{_MEDIA}.manifest.v1+json", manifest)
        # Here tools look for the tag of an image in a folder.
        named = {"org.opencontainers.image.ref.name": tag}
        index = {
            "schemaVersion": 2,
            "mediaType": f"{_MEDIA}.index.v1+json",
            "manifests": [{**described, "platform": self._platform(), "annotations": named}],
        }
        (self.folder / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
        (self.folder / INDEX).write_bytes(_json(index))
        return str(described["digest"])

    def _write_blob(self, media_type: str, document: dict[str, Any]) -> dict[str, Any]:
        """Write a document and return its descriptor."""
        data = _json(document)
        digest = hashlib.sha256(data).hexdigest()
        (self.folder / _BLOBS / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
