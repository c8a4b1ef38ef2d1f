"""The bill of materials of a built model, ``vllm_env.cdx.json`` (CycloneDX 1.5).

It lists what others made: each conda package and each wheel, the stub, and each shared library that
the build took from this machine or from Triton. The C compiler of GPU kernels
is the wheel ziglang.
"""

import json
from pathlib import Path
from typing import Any

from vllm_env.base.filesystem import file_sha256
from vllm_env.interpreter.layer import CondaPackage
from vllm_env.lock.pylock import Lock, LockedWheel
from vllm_env.triton.root import STUB_LIBRARIES, STUB_NAME
from vllm_env.triton.stub import Stub

SBOM_NAME = "vllm_env.cdx.json"


def render_sbom(lock: Lock, libraries: dict[str, Path], stub: Stub) -> str:
    """Return the bill of materials; equal inputs give equal text.

    Args:
        lock: the packages.
        libraries: the shared libraries of no package, by their paths in the environment.
        stub: the stub, with the libraries next to it.
    """
    components = []
    for package in lock.conda.packages:
        # The qualifiers tell builds of one version apart (package URL specification, type conda).
        qualifiers = f"build={package.build}&subdir={package.subdir}"
        url = f"pkg:conda/{package.name}@{package.version}?{qualifiers}"
        components.append(_package_component(url, package))
    # Sorted, because equal locks may list their wheels in another order.
    wheels = sorted(lock.wheels, key=lambda wheel: wheel.name)
    components += [
        _package_component(f"pkg:pypi/{wheel.name}@{wheel.version}", wheel) for wheel in wheels
    ]
    components += [_library_component(place, file) for place, file in sorted(libraries.items())]
    # Without a stub, the server's own is used, which is no part of the model.
    if stub.path:
        components.append(_stub_component(stub))
    if stub.libraries:
        beside = sorted(stub.libraries.iterdir())
        components += [_library_component(f"{STUB_LIBRARIES}/{file.name}", file) for file in beside]
    # No serial number and no time, which CycloneDX allows: both would differ from build to build.
    described = {"type": "application", "name": "vllm_env", "version": lock.digest}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": described},
        "components": components,
    }
    return json.dumps(document, indent=1) + "\n"


def _package_component(url: str, package: CondaPackage | LockedWheel) -> dict[str, Any]:
    """Return the component of a package; ``url`` is its package URL (pkg:…)."""
    return {
        "type": "library",
        "bom-ref": url,
        "name": package.name,
        "version": package.version,
        "purl": url,
        "hashes": _hashes(package.sha256),
    }


def _stub_component(stub: Stub) -> dict[str, Any]:
    """Return the component of the stub, which is made of ``python_backend`` at Triton's release."""
    return {
        "type": "application",
        "bom-ref": STUB_NAME,
        "name": STUB_NAME,
        "version": stub.release,
        "purl": f"pkg:github/triton-inference-server/python_backend@r{stub.release}",
        "hashes": _hashes(stub.sha256),
        "evidence": {"occurrences": [{"location": STUB_NAME}]},
    }


def _library_component(place: str, file: Path) -> dict[str, Any]:
    """Return the component of a shared library; ``place`` is its path in the environment."""
    # Not versioned: a library's file has no version of its package.
    return {
        "type": "library",
        "bom-ref": place,
        "name": file.name,
        "hashes": _hashes(file_sha256(file)),
        "evidence": {"occurrences": [{"location": place}]},
    }


def _hashes(sha256: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": sha256}]
