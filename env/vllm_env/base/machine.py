"""The machines that environments are built on and for: x86-64 Linux.

The files of an environment do not depend on the machine that builds it.
"""

import os
import platform
import shutil
from pathlib import Path

from .errors import VllmEnvError

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
    # The other lines of a GPU's file, such as its interrupt, may change with each start.
    files = sorted(_NVIDIA.glob("gpus/*/information"))
    lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
    models = [line for line in lines if line.startswith("Model:")]
    version = _NVIDIA / "version"
    driver = version.read_text("utf-8") if version.is_file() else ""
    return "\n".join([driver, *models]).strip()


def require_x86_64() -> None:
    """Raise a VllmEnvError that names this machine if it is not Linux on x86_64."""
    machine = platform.machine()
    # A Mac is "Darwin arm64" or, with an Intel processor, "Darwin x86_64".
    if platform.system() != "Linux":
        machine = f"{platform.system()} {machine}"
    if machine != "x86_64":
        raise VllmEnvError(
            f"This machine is {machine}; environments are built on x86_64 Linux for x86_64 only.",
            remedy="Run this on an x86_64 Linux machine.",
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
