"""A folder that is laid out as a Triton root, for tests that start no server."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from vllm_env.interpreter.local import find_interpreter

if TYPE_CHECKING:
    from pathlib import Path

RELEASE = "24.10"
PYTHON = "3.11"


def make_root(folder: Path) -> Path:
    """Make a root of release 24.10 whose only stub is for Python 3.11; none of its programs is one."""
    stub = folder / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    for file in (folder / "bin/tritonserver", folder / "backends/python/libtriton_python.so", stub):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        file.chmod(0o755)
    shutil.copy(find_interpreter(PYTHON).executable, stub)  # it loads libpython3.11, as a stub does
    (folder / "TRITON_VERSION").write_text("2.51.0\n")
    (folder / "RELEASE").write_text(f"{RELEASE}\n")
    return folder
