"""Run client/client.py as a user does."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from support.repositories import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

CLIENT = CHECKOUT / "client" / "client.py"
PROMPTS = "Hello, my name is\nThe capital of France is\n"


def run(*arguments: object, cwd: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run the client in a folder and return what it printed."""
    argv = [python, str(CLIENT), *map(str, arguments)]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
