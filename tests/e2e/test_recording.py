"""The picture of the quick start has the lines that the commands print now."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_env.base.workspace import CHECKOUT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]  # a build, and two starts of a server


def test_the_recording_is_what_the_commands_print() -> None:
    """Times apart."""
    done = subprocess.run(
        [sys.executable, CHECKOUT / "tools/recording.py", "--check"], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
