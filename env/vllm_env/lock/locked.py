"""The records of a lock: what it was resolved from, and the exact files that it came to."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from vllm_env.interpreter.layer import CondaLayer

from .pins import PinnedVllm
from .spec import Spec

PYTORCH = "pytorch"
"""``LockedWheel.index`` of a build that only the PyTorch project's own index has, such as ``torch==2.13.0+cpu``."""


@dataclass(frozen=True)
class LockedWheel:
    """One wheel: normalised name, version, file name, SHA-256 and size in bytes (0 if unknown).

    ``index`` is ``pytorch`` or empty for the registries that pip is configured with; ``url`` is where a file lies that no
    index has, such as a pinned wheel.
    """

    name: str
    version: str
    file: str
    sha256: str
    size: int = 0
    index: str = ""
    url: str = ""

    @property
    def requirement(self) -> str:
        """The wheel as a line of a requirements file with its hash."""
        what = f"{self.name} @ {self.url}" if self.url else f"{self.name}=={self.version}"
        return f"{what} --hash=sha256:{self.sha256}"


@dataclass(frozen=True)
class Inputs:
    """What a lock was resolved from, as in ``Spec``; ``pin`` is the pinned vLLM's requirement, a file's without its folder."""

    profile: str
    pin: str
    distribution: str
    python: str
    torch_backend: str = ""
    requirements: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    wheel_index: str = ""
    git_url: str = ""

    def drift(self, now: "Inputs") -> str:
        """Return what differs from other inputs, with both values, or nothing."""
        pairs = ((f.name, getattr(self, f.name), getattr(now, f.name)) for f in dataclasses.fields(self))
        return "; ".join(f"{name} was {_shown(old)} and is {_shown(new)}" for name, old, new in pairs if old != new)


def _shown(value: object) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)


@dataclass(frozen=True)
class Lock:
    """An exact environment: the conda layer that this machine installs, and the wheels."""

    spec: Spec
    vllm: PinnedVllm
    conda: CondaLayer
    wheels: tuple[LockedWheel, ...]
    inputs: Inputs

    @property
    def digest(self) -> str:
        """SHA-256 of what is locked, in hexadecimal; where the files come from does not count."""
        packages = [dataclasses.asdict(p) for p in self.conda.packages]
        wheels = sorted((w.name, w.version, w.sha256) for w in self.wheels)
        return hashlib.sha256(json.dumps([packages, wheels], sort_keys=True).encode()).hexdigest()

    @property
    def python(self) -> str:
        """The interpreter's full version, such as ``3.11.7``."""
        return self.conda.python

    @property
    def download_size(self) -> int:
        """Bytes of all wheels whose size is known."""
        return sum(wheel.size for wheel in self.wheels)

    @property
    def requirements(self) -> str:
        """The wheels as a requirements file with hashes, which uv and pip read."""
        return "".join(f"{wheel.requirement}\n" for wheel in self.wheels)

    def versions(self) -> dict[str, str]:
        """Return the version of each locked distribution by its normalised name."""
        return {wheel.name: wheel.version for wheel in self.wheels}
