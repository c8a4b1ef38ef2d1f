"""The environment's bill of materials in CycloneDX 1.5, from the lock; equal locks give equal text."""

import json
from typing import Any

from vllm_env.lock.locked import Lock


def render_sbom(lock: Lock) -> str:
    """Return the SBOM: a component for each conda package and each wheel, with package URL, version and SHA-256."""
    conda = [
        _component(f"pkg:conda/{p.name}@{p.version}?build={p.build}&subdir={p.subdir}", p.name, p.version, p.sha256)
        for p in lock.conda.packages
    ]
    wheels = [
        _component(f"pkg:pypi/{wheel.name}@{wheel.version}", wheel.name, wheel.version, wheel.sha256)
        for wheel in sorted(lock.wheels, key=lambda wheel: wheel.name)
    ]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "vllm_env", "version": lock.digest}},
        "components": [*conda, *wheels],
    }
    return json.dumps(document, indent=1) + "\n"


def _component(url: str, name: str, version: str, digest: str) -> dict[str, Any]:
    hashes = [{"alg": "SHA-256", "content": digest}]
    return {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url, "hashes": hashes}
