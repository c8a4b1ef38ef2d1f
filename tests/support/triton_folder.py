"""A folder that is laid out as a Triton root, for tests that start no server."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from support.elf_files import make_library, make_program
from support.once import once

if TYPE_CHECKING:
    from pathlib import Path

RELEASE = "24.10"
PYTHON = "3.11"


def _make_stub(folder: Path) -> Path:
    """Make a program that loads libpython, as a stub does. Debian's interpreter would not do."""
    return make_program(folder / "stub", (make_library(folder, f"libpython{PYTHON}.so.1.0"),))


def make_root(folder: Path) -> Path:
    """Make a root of release 24.10 whose only stub is for Python 3.11; none of its programs is one."""
    stub = folder / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    for file in (folder / "bin/tritonserver", folder / "backends/python/libtriton_python.so", stub):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        file.chmod(0o755)
    shutil.copy(once("stub_of_no_triton", _make_stub), stub)
    (folder / "TRITON_VERSION").write_text("2.51.0\n")
    (folder / "RELEASE").write_text(f"{RELEASE}\n")
    return folder
