"""The environment's bill of materials in CycloneDX 1.5, from the lock; equal locks give equal text."""

import json
from typing import Any

from vllm_env.interpreter.layer import CondaPackage
from vllm_env.lock.locked import Lock, LockedWheel


def render_sbom(lock: Lock) -> str:
    """Return the SBOM: a component for each conda package and each wheel, with package URL, version and SHA-256."""
    wheels = sorted(lock.wheels, key=lambda wheel: wheel.name)
    parts = [_component(f"pkg:conda/{p.name}@{p.version}?build={p.build}&subdir={p.subdir}", p) for p in lock.conda.packages]
    parts += [_component(f"pkg:pypi/{wheel.name}@{wheel.version}", wheel) for wheel in wheels]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "vllm_env", "version": lock.digest}},
        "components": parts,
    }
    return json.dumps(document, indent=1) + "\n"


def _component(url: str, part: CondaPackage | LockedWheel) -> dict[str, Any]:
    hashes = [{"alg": "SHA-256", "content": part.sha256}]
    return {"type": "library", "bom-ref": url, "name": part.name, "version": part.version, "purl": url, "hashes": hashes}
