"""The machines that environments are built on and for."""

import platform

from .errors import VllmEnvError


def require_x86_64() -> None:
    """Refuse a machine that is no Linux on x86_64 with a VllmEnvError that names it."""
    machine = " ".join(part for part in (platform.system().replace("Linux", ""), platform.machine()) if part)
    if machine != "x86_64":
        what = f"This machine is {machine}; environments are built on x86_64 Linux for x86_64 only."
        raise VllmEnvError(what, remedy="Run this on an x86_64 Linux machine.")
