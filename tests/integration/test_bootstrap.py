"""The bootstrap with the oldest pip that it must do with, from the package registry."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from support.bootstrap_place import Place

if TYPE_CHECKING:
    from pathlib import Path


def test_pip_of_ubuntu_22_04_is_enough(tmp_path: Path) -> None:
    """22.0.2 has no --python."""
    place = Place(tmp_path)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "old"], check=True)
    python = tmp_path / "old/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "pip==22.0.2"], check=True)
    code, out, err = place.run(PYTHON=str(python))
    assert (code, out[:6]) == (0, '["1.0"'), err
    argv = [python, "-m", "pip", "--python", python, "list"]
    assert "no such option: --python" in subprocess.run(argv, capture_output=True, text=True, check=False).stderr
