"""What the processes of a server run, and which libraries they have loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_env.serve.server import TritonServer


def libraries_of(server: TritonServer, name: str) -> set[str]:
    """Return the paths from which any process of a server has loaded the library ``name``."""
    maps = (Path(f"/proc/{process.pid}/maps").read_text() for process in server.members())
    return {line.split()[-1] for text in maps for line in text.splitlines() if line.endswith(f"/{name}")}


def programs_of(server: TritonServer) -> set[str]:
    """Return the paths of the programs that a server's processes are."""
    return {str(Path(f"/proc/{process.pid}/exe").readlink()) for process in server.members()}
