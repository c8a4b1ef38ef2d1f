"""The NVIDIA driver of this machine: which CUDA versions it runs, and what to do if it is too old.

``startup/driver.py`` of the model says the same at load. A test compares both.
"""

import re
import sys
from pathlib import Path

from .command import COMMAND
from .errors import CommandError
from .process import capture

_VERSION_FILE = Path("/proc/driver/nvidia/version")
# The first driver for each CUDA version, for Linux, by the release notes of NVIDIA's CUDA toolkit.
# Within CUDA 12 or 13, it runs every minor version.
_FIRST_DRIVERS = {12: "525.60", 13: "580.65"}
_OLDER_CUDA = "12.9"
# The driver's library answers for itself or, in a container, for NVIDIA's compatibility package,
# which replaces it. The call initializes no GPU. In a process of its own, because a driver may
# hang.
_ASK = """\
import ctypes
version = ctypes.c_int()
ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
if version.value:
    print(f"{version.value // 1000}.{version.value % 1000 // 10}")
"""
_ASK_SECONDS = 30.0


def cuda_of_driver() -> str:
    """Return the newest CUDA version that the driver runs, such as ``12.2``; "" if unknown."""
    try:
        status, output = capture([sys.executable, "-I", "-c", _ASK], seconds=_ASK_SECONDS)
    except CommandError:
        return ""
    # Without a driver, Python ends with an error.
    return output.strip() if status == 0 else ""


def driver_version() -> str:
    """Return the driver's own version, such as ``535.183.01``; "" if its module is not loaded."""
    text = _VERSION_FILE.read_text("utf-8") if _VERSION_FILE.is_file() else ""
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", text)
    return match[1] if match else ""


def too_old(cuda: str) -> tuple[str, str]:
    """Return why the driver of this machine cannot run a CUDA version, and what to do.

    Both are empty if it can, or if nothing is known of one of them.
    """
    return complaint(cuda_of_driver(), driver_version(), cuda)


def complaint(runs: str, driver: str, cuda: str) -> tuple[str, str]:
    """Return why a driver cannot run ``cuda``, and what to do; both empty if it can.

    Args:
        runs: the newest CUDA version that the driver runs; "" if it is not known.
        driver: the driver's own version; "" if it is not known.
        cuda: the CUDA version of an environment; "" if it has none.
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
    if _major(runs) < _major(_OLDER_CUDA):
        return what, f"{update[0].upper()}{update[1:]}."
    return what, f"Build it with {COMMAND} --cuda {_OLDER_CUDA}, or {update}."


def _major(version: str) -> int:
    return int(version.split(".", maxsplit=1)[0])
