"""Find the release of the server that started this process.

Its ports are not open while models load, so nobody can ask it. Its files and variables say it.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

CONTAINER_ROOT = Path("/opt/tritonserver")
_SERVER_PROGRAM = "tritonserver"


def find(server: int, variables: Mapping[str, str]) -> str:
    """Return the release of a server, such as ``24.10``, or an empty string if it is not known.

    The files in the server's root come first, then the variables of NVIDIA's container.

    Args:
        server: the server's process id.
        variables: the environment variables of this process, which has them from the server.
    """
    # The packager finds a root's release in the same places (vllm_env/triton/root.py).
    root = _root(server)
    # The variables say which Triton is in the container's root. A Triton that a user has mounted
    # elsewhere may be of another release.
    about_root = variables if root == CONTAINER_ROOT else {}
    release = _content(root / "RELEASE") or about_root.get("NVIDIA_TRITON_SERVER_VERSION", "")
    if re.fullmatch(r"\d\d\.\d\d", release):
        return release
    version = _content(root / "TRITON_VERSION")
    for name in ("TRITON_VERSION", "TRITON_SERVER_VERSION"):
        version = version or about_root.get(name, "")
    return release_of(version)


def release_of(version: str) -> str:
    """Return the release (``24.10``) of a server version (``2.51.0``), or an empty string."""
    numbers = re.match(r"2\.(\d+)(?:\.(\d+))?", version)
    if numbers is None:
        return ""
    minor = int(numbers[1])
    # From NVIDIA's release notes: 2.51 is 24.10, and each month has a new minor version.
    months = 24 * 12 + 9 + minor - 51
    # But 25.07 came as 2.59.1, with the minor version of 25.06.
    if (minor, int(numbers[2] or 0)) > (59, 0):
        months += 1
    year, month = divmod(months, 12)
    return f"{year}.{month + 1:02d}"


def _root(server: int) -> Path:
    """Return the folder above the folder of the server's program."""
    # The kernel refuses the link of a process with more rights than this one has.
    with contextlib.suppress(OSError):
        program = Path(f"/proc/{server}/exe").readlink()
        if program.name == _SERVER_PROGRAM:
            return program.parent.parent
    # A Python program may embed Triton, as the container's OpenAI frontend does.
    return CONTAINER_ROOT


def _content(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
