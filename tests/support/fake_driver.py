"""A stand-in for the NVIDIA driver's library, which names the CUDA version that it runs."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LIBRARY = "libcuda.so.1"


def make_driver(folder: Path, cuda: str) -> Path:
    """Compile the library into a folder, for LD_LIBRARY_PATH; return its file."""
    major, minor = cuda.split(".")
    number = 1000 * int(major) + 10 * int(minor)
    folder.mkdir(parents=True, exist_ok=True)
    source = f"int cuDriverGetVersion(int *version) {{ *version = {number}; return 0; }}\n"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", folder / LIBRARY]
    subprocess.run(command, input=source, text=True, check=True)
    return folder / LIBRARY
