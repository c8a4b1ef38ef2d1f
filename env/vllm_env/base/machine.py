"""What environments are built on and for: x86-64 Linux, and no folder or time of the machine that built them."""

import os
import platform

from .errors import VllmEnvError

NEUTRAL_PREFIX = "/opt/vllm_env"
"""Replaces the folder of the build; nothing exists there."""

EPOCH = 1_577_836_800
"""Time of every file in an environment, s since 1970 (2020-01-01): bytecode stays valid because Triton restores it."""


def require_x86_64() -> None:
    """Refuse a machine that is no Linux on x86_64 with a VllmEnvError that names it."""
    machine = " ".join(part for part in (platform.system().replace("Linux", ""), platform.machine()) if part)
    if machine != "x86_64":
        what = f"This machine is {machine}; environments are built on x86_64 Linux for x86_64 only."
        raise VllmEnvError(what, remedy="Run this on an x86_64 Linux machine.")


def require_glibc(minor: int, what: str, remedy: str) -> None:
    """Refuse a machine whose C library is older than glibc 2.``minor`` with a VllmEnvError that names ``what`` needs it."""
    library = os.confstr("CS_GNU_LIBC_VERSION") or "another than glibc"
    if not library.startswith("glibc 2.") or int(library.split(".")[1]) < minor:
        raise VllmEnvError(f"{what} needs glibc 2.{minor} or newer, and this machine's C library is {library}.", remedy=remedy)
