"""The manifest ``vllm_env.json``: what a built model holds, by which it is verified, reused and loaded."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from vllm_env import __version__
from vllm_env.base.errors import VllmEnvError

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_env.lock.lock import Lock
    from vllm_env.prefix.prune import Pruned
    from vllm_env.triton.root import TritonRoot
    from vllm_env.triton.stub import Stub

MANIFEST_NAME = "vllm_env.json"
ARCHIVE_NAME = "vllm_env.tar.gz"
DIRECTORY_NAME = "vllm_env"
SBOM_NAME = "vllm_env.cdx.json"
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What was built, from what, and for which Triton.

    ``archive`` has name, sha256, size (bytes), members and unpacked (bytes); ``stub`` has name, sha256, size, python,
    release and origin; ``vllm`` has version, commit, distribution and origin.
    """

    key: str
    layout: str
    vllm: dict[str, str]
    python: str
    versions: dict[str, str]
    triton_release: str
    archive: dict[str, Any]
    stub: dict[str, Any]
    spec: dict[str, Any]
    lock_digest: str
    left_out: list[dict[str, Any]]
    built_at: str
    built_by: str = f"vllm-env {__version__}"
    format: int = FORMAT

    def to_json(self) -> str:
        """Return the manifest's text."""
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"


def describe_build(
    *,
    key: str,
    layout: str,
    lock: Lock,
    triton: TritonRoot,
    stub: Stub,
    archive: dict[str, Any],
    pruned: tuple[Pruned, ...],
    built_at: str,
) -> Manifest:
    """Return the manifest of a build; ``built_at`` is a time in ISO 8601."""
    versions = lock.versions()
    chosen = ("torch", "numpy", "transformers", "setuptools", "triton")
    name = re.split(r"[\s=@\[]", lock.vllm.requirement, maxsplit=1)[0]  # a wheel may have another than the profile
    return Manifest(
        key=key,
        layout=layout,
        vllm={
            "version": versions.get(str(canonicalize_name(name)), ""),
            "commit": lock.vllm.commit,
            "distribution": name,
            "origin": lock.vllm.origin,
        },
        python=lock.python,
        versions={n: versions[n] for n in chosen if n in versions},
        triton_release=triton.release,
        archive=archive,
        stub={
            "name": "triton_python_backend_stub",
            "sha256": stub.sha256,
            "size": stub.size,
            "python": stub.python,
            "release": stub.release,
            "origin": stub.origin,
        },
        spec=lock.inputs,
        lock_digest=lock.digest,
        left_out=[dataclasses.asdict(p) for p in pruned],
        built_at=built_at,
    )


def read_manifest(model: Path) -> Manifest | None:
    """Return the manifest of a built model's folder, or None if it has none.

    Raises:
        VllmEnvError: the file is damaged or of another format.
    """
    file = model / MANIFEST_NAME
    if not file.is_file():
        return None
    try:
        document = json.loads(file.read_text("utf-8"))
        if document.get("format") != FORMAT:
            raise VllmEnvError(f"{file} has format {document.get('format')}, not {FORMAT}.", remedy="Build it again.")
        return Manifest(**document)
    except (ValueError, TypeError, AttributeError) as error:
        raise VllmEnvError(f"{file} is damaged: {error}.", remedy="Build it again: ./gen_vllm_env.sh.") from error
