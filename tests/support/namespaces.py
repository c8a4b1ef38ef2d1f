"""Mount, process and network namespaces, as a container has them, for programs that tests start."""

from __future__ import annotations

import subprocess

import pytest

_MOUNT_ALL = """\
while [ "$1" != -- ]; do
    mount --bind "$1" "$2"
    shift 2
done
shift
exec "$@"
"""


def with_mounts(*pairs: tuple[object, object]) -> list[str]:
    """Return what to put before a command, so that in its own mount namespace ``(source, point)`` are bind mounts.

    Skips the test where that is not permitted.
    """
    prefix = [*_permitted("--mount"), "sh", "-ec", _MOUNT_ALL, "sh"]
    return [*prefix, *(str(part) for pair in pairs for part in pair), "--"]


def with_own_processes() -> list[str]:
    """Return what to put before a command, so that it is process 1 and sees no process from outside, as in a container.

    It is killed with the process that is put before it. Skips the test where that is not permitted.
    """
    return _permitted("--pid", "--fork", "--kill-child", "--mount-proc")


def without_network() -> list[str]:
    """Return what to put before a command, so that it has no network but its own 127.0.0.1.

    Skips the test where that is not permitted.
    """
    return [*_permitted("--net"), "sh", "-ec", 'ip link set lo up; exec "$@"', "sh"]


def _permitted(*options: str) -> list[str]:
    said = ""
    for user in ([], ["--user", "--map-root-user"]):
        argv = ["unshare", *user, *options]
        mounts = "mount --bind /tmp /tmp" if "--mount" in options else "true"
        done = subprocess.run([*argv, "sh", "-ec", mounts], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return argv
        said = done.stderr.strip()
    pytest.skip(f"no namespaces here: {said}")
