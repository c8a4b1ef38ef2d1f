"""Run one py-rattler job and exit: ``python -m vllm_env.interpreter.rattler_worker JOB``.

The job is JSON (``_package_job`` and ``_index`` in layer.py). The answer is JSON, too, on the last
line of stdout.

This is a process of its own: a signal must end it, and the threads of rattler's runtime must not
disturb the packager.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import rattler
from rattler.index import index_fs

from vllm_env.base.machine import NEUTRAL_PREFIX


async def _solve(job: dict[str, Any]) -> list[dict[str, str]]:
    """Return the fields of ``CondaPackage`` (layer.py) for each package that the specs need."""
    records = await _solved_records(job)
    packages = [
        {
            "name": record.name.normalized,
            "version": str(record.version),
            "build": str(record.build),
            "subdir": str(record.subdir),
            "file_name": str(record.file_name),
            "sha256": _sha256(record),
        }
        for record in records
    ]
    return sorted(packages, key=lambda package: package["name"])


def _sha256(record: Any) -> str:
    # A channel may lack the digest of a package.
    return record.sha256.hex() if record.sha256 else ""


async def _install(job: dict[str, Any]) -> None:
    """Install the packages that the specs need into a prefix.

    Raises:
        RuntimeError: they are not the expected ones.
    """
    records = await _solved_records(job)
    digests = {record.file_name: _sha256(record) for record in records}
    # The channel may have changed since the lock was made.
    if digests != job["expected"]:
        raise RuntimeError(f"the channel has {digests}, the lock has {job['expected']}")
    await rattler.install(
        records,
        job["prefix"],
        cache_dir=Path(job["cache"]) / "packages",
        show_progress=False,
        execute_link_scripts=False,
        # Files then contain the neutral prefix and not the folder of the build.
        alternative_target_prefix=NEUTRAL_PREFIX,
    )


async def _solved_records(job: dict[str, Any]) -> list[Any]:
    """Return rattler's records of the packages that the specs need, from the job's channel."""
    records: list[Any] = await rattler.solve(
        [job["channel_url"]],
        job["specs"],
        gateway=rattler.Gateway(cache_dir=Path(job["cache"]) / "repodata"),
        platforms=[job["platform"], "noarch"],
        virtual_packages=rattler.VirtualPackage.detect(),
    )
    return records


_JOBS = {"index": lambda job: index_fs(Path(job["channel"])), "solve": _solve, "install": _install}


def main() -> None:
    """Run the job and exit without waiting for rattler's threads."""
    job = json.loads(sys.argv[1])
    status = 0
    try:
        result = asyncio.run(_JOBS[job["kind"]](job))
        sys.stdout.write(f"{json.dumps(result)}\n")
    except Exception as error:  # noqa: BLE001 - the parent shows it
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The threads outlive asyncio.run(). They abort an interpreter that shuts down meanwhile:
    # "PyGILState_Release: thread state must be current" (py-rattler 0.28).
    os._exit(status)


if __name__ == "__main__":
    main()
