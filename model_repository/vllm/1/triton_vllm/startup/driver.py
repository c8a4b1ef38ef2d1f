"""Refuse an NVIDIA driver that is too old for the environment, before CUDA does it in its words."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

from triton_vllm.base.errors import ConfigError

_LIBRARY = "libcuda.so.1"
_VERSION_FILE = Path("/proc/driver/nvidia/version")
# The first driver for each CUDA version, for Linux, by the release notes of NVIDIA's CUDA toolkit.
# Within CUDA 12 or 13, it runs every minor version.
_FIRST_DRIVERS = {12: "525.60", 13: "580.65"}
_OLDER_CUDA = "12.9"
"""The CUDA version of the builds for older drivers."""


def check() -> None:
    """Compare this machine's driver with the CUDA version of the environment's torch.

    Raises:
        ConfigError: the driver is too old.
    """
    what, remedy = complaint(
        runs=_cuda_of_driver(), driver=_driver_version(), cuda=_cuda_of_torch()
    )
    if what:
        raise ConfigError(f"{what} {remedy}")


def complaint(runs: str, driver: str, cuda: str) -> tuple[str, str]:
    """Return why a driver cannot run ``cuda``, and what to do; both empty if it can.

    Args:
        runs: the newest CUDA version that the driver runs. An empty string if it is not known.
        driver: the driver's own version. An empty string if it is not known.
        cuda: the CUDA version of the environment. An empty string if it has none.
    """
    if not runs or not cuda or _major(runs) >= _major(cuda):
        return "", ""
    what = (
        f"The NVIDIA driver {driver or 'here'} runs CUDA up to {runs}, "
        f"and this environment is for CUDA {cuda}."
    )
    update = "update the driver"
    if _major(cuda) in _FIRST_DRIVERS:
        update = f"update the driver to {_FIRST_DRIVERS[_major(cuda)]} or newer"
    # The driver is too old for the older CUDA, too.
    if _major(runs) < _major(_OLDER_CUDA):
        return what, f"{update[0].upper()}{update[1:]}."
    return what, f"Build it with ./gen_vllm_env.sh --cuda {_OLDER_CUDA}, or {update}."


def _major(version: str) -> int:
    return int(version.split(".", maxsplit=1)[0])


def _cuda_of_driver() -> str:
    """Return the newest CUDA version that the driver runs, such as ``13.0``; "" if not known."""
    # The library answers for itself or, in a container, for NVIDIA's compatibility package, which
    # replaces it. The call initializes no GPU, so a fork may follow.
    version = ctypes.c_int()
    try:
        ctypes.CDLL(_LIBRARY).cuDriverGetVersion(ctypes.byref(version))
    # There is no driver. Or it is a stand-in that only lets imports succeed.
    except (OSError, AttributeError):
        return ""
    if not version.value:
        return ""
    # 12090 is 12.9
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _driver_version() -> str:
    """Return the version of the kernel's driver, such as ``580.65.06``; "" if not known."""
    try:
        text = _VERSION_FILE.read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", text)
    return match[1] if match else ""


def _cuda_of_torch() -> str:
    """Return the CUDA version that torch was built for, such as ``13.0``; "" if it has none."""
    # Read from its file, because importing torch takes seconds.
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        return ""
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"^cuda\b.*= *['\"](\d+\.\d+)", text, re.MULTILINE)
    return match[1] if match else ""
