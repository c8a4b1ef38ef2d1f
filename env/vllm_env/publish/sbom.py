"""The environment's bill of materials in CycloneDX 1.5, from the lock; equal locks give equal text."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from vllm_env.lock.lock import Lock

_BLOCK = re.compile(r"^([A-Za-z0-9][\w.-]*)[^\n]*?((?:\\\n\s+--hash=sha256:[0-9a-f]{64}\s*)*)$", re.MULTILINE)


def render_sbom(lock: Lock) -> str:
    """Return the SBOM: a component per conda package and per wheel, with package URL, version and SHA-256."""
    hashes = {
        str(canonicalize_name(name)): re.findall(r"sha256:([0-9a-f]{64})", block)
        for name, block in _BLOCK.findall(lock.requirements)
    }
    conda = [
        _component(f"pkg:conda/{p.name}@{p.version}?build={p.build}&subdir={p.subdir}", p.name, p.version, [p.sha256])
        for p in lock.conda.packages
    ]
    wheels = [
        _component(f"pkg:pypi/{name}@{version}", name, version, hashes.get(name, []))
        for name, version in sorted(lock.versions().items())
    ]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "vllm_env", "version": lock.digest}},
        "components": [*conda, *wheels],
    }
    return json.dumps(document, indent=1) + "\n"


def _component(url: str, name: str, version: str, digests: list[str]) -> dict[str, Any]:
    component: dict[str, Any] = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
    if len(digests) == 1:  # several digests are those of files for other platforms, of which one was installed
        component["hashes"] = [{"alg": "SHA-256", "content": digests[0]}]
    return component
