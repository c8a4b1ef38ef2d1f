"""The machines that environments are built on and for: Linux on x86-64, and on Arm.

The files of an environment do not depend on the machine that builds it.
"""

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from .errors import VllmEnvError


@dataclass(frozen=True)
class Platform:
    """A kind of machine that environments are for.

    Attributes:
        name: as container images name it: ``linux/amd64``.
        machine: as the kernel and wheels name its processor: ``x86_64``.
        conda: as conda channels name it: ``linux-64``.
    """

    name: str
    machine: str
    conda: str

    @property
    def short(self) -> str:
        """Return the part of the name that tells platforms apart: ``amd64``."""
        return self.name.partition("/")[2]

    @property
    def multiarch(self) -> str:
        """Return Debian's name for its folders: ``x86_64-linux-gnu``."""
        return f"{self.machine}-linux-gnu"


AMD64 = Platform("linux/amd64", "x86_64", "linux-64")
ARM64 = Platform("linux/arm64", "aarch64", "linux-aarch64")
PLATFORMS = {known.name: known for known in (AMD64, ARM64)}
"""All platforms by their names."""

NEUTRAL_PREFIX = "/opt/vllm_env"
"""Replaces the path of the build folder in files; nothing exists there."""

EPOCH = 1_577_836_800
"""Modification time of every file in an environment, s since 1970 (2020-01-01).

Triton restores it when it unpacks, so compiled bytecode stays valid.
"""

_NVIDIA = Path("/proc/driver/nvidia")


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU that programs can use."""
    devices = Path("/dev")
    if (devices / "nvidiactl").exists():
        return True
    # An image may have nvidia-smi without a GPU.
    return shutil.which("nvidia-smi") is not None and any(devices.glob("nvidia[0-9]*"))


def gpus() -> str:
    """Return a description of the NVIDIA driver and of each GPU; "" if the driver is not loaded."""
    files = sorted(_NVIDIA.glob("gpus/*/information"))
    lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
    # The other lines of a GPU's file, such as its interrupt, may change with each start.
    models = [line for line in lines if line.startswith("Model:")]
    version = _NVIDIA / "version"
    driver = version.read_text("utf-8") if version.is_file() else ""
    return "\n".join([driver, *models]).strip()


def this_platform() -> Platform:
    """Return the platform of this machine.

    Raises:
        VllmEnvError: no environment is built on such a machine.
    """
    machine = platform.machine()
    # A Mac is "Darwin arm64" or, with an Intel processor, "Darwin x86_64".
    if platform.system() != "Linux":
        machine = f"{platform.system()} {machine}"
    for known in PLATFORMS.values():
        if machine == known.machine:
            return known
    names = " and ".join(known.machine for known in PLATFORMS.values())
    raise VllmEnvError(
        f"This machine is {machine}; environments are built on Linux for {names} only.",
        remedy="Run this on such a machine.",
    )


def require_glibc(minor: int, what: str, remedy: str) -> None:
    """Raise a VllmEnvError about ``what`` if this machine's glibc is older than 2.``minor``."""
    # musl returns no version.
    library = os.confstr("CS_GNU_LIBC_VERSION") or "another than glibc"
    if not library.startswith("glibc 2.") or int(library.split(".")[1]) < minor:
        raise VllmEnvError(
            f"{what} needs glibc 2.{minor} or newer, and this machine's C library is {library}.",
            remedy=remedy,
        )
