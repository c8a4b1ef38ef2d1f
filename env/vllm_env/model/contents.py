"""The files of an unpacked environment: one digest of all, and which of them are changed."""

import base64
import csv
import hashlib
import io
import os
import posixpath
from collections import defaultdict
from pathlib import Path

from vllm_env.base import report
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.layout.layout import EnvironmentRecord


def paths_in(folder: Path) -> list[str]:
    """Return the files and links below a folder, sorted and relative to it."""
    paths = []
    for parent, folders, names in os.walk(folder):
        inner = os.path.relpath(parent, folder)
        # os.walk() lists links to folders as folders, and does not follow them.
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        paths += [posixpath.normpath(f"{inner}/{name}") for name in (*names, *links)]
    return sorted(paths)


def record_of(environment: Path, name: str) -> EnvironmentRecord:
    """Return the record of an unpacked environment, with one digest of all its files and links.

    The digest depends on paths, contents and targets of links. It does not depend on modes and
    times, nor on empty folders.
    """
    digest = hashlib.sha256()
    size = 0
    paths = paths_in(environment)
    for number, path in enumerate(paths):
        file = environment / path
        if file.is_symlink():
            content = f"link {file.readlink()}"
        else:
            content = f"file {file_sha256(file)}"
            size += file.stat().st_size
        digest.update(os.fsencode(f"{path}\0{content}\0"))
        # Of 60,000 files, so many steps of the progress are enough.
        if number % 1000 == 0:
            report.step("digests", number / len(paths))
    return EnvironmentRecord(
        name=name, sha256=digest.hexdigest(), size=size, members=len(paths), unpacked=size
    )


def check_unpacked(environment: Path, remedy: str) -> None:
    """Check the files of wheels against their digests, which each wheel's RECORD has.

    Bytecode and the interpreter have none there.

    Raises:
        VllmEnvError: names a file that is missing or changed.
    """
    # Two wheels may own one file with different contents, such as LICENSE. One of them is there.
    expected: dict[str, set[str]] = defaultdict(set)
    for record in sorted(environment.glob("lib/python3.*/site-packages/*.dist-info/RECORD")):
        packages = record.parent.parent
        # conda-forge's Python has a link lib/python3.1 to the folder.
        if packages.parent.is_symlink():
            continue
        for row in csv.reader(io.StringIO(record.read_text("utf-8"))):
            # Wheels that bring bytecode: the build replaces it by its own.
            if len(row) > 1 and row[1].startswith("sha256=") and not row[0].endswith(".pyc"):
                expected[os.path.normpath(packages / row[0])].add(row[1])
    for number, (file, digests) in enumerate(expected.items()):
        is_missing = not Path(file).is_file()
        if is_missing or _wheel_digest(Path(file)) not in digests:
            raise VllmEnvError(
                f"{file} is {'missing' if is_missing else 'changed'}.",
                cause="It differs from the RECORD of its wheel.",
                remedy=remedy,
            )
        if number % 1000 == 0:
            report.step("digests of wheels", number / len(expected))


def _wheel_digest(file: Path) -> str:
    """Return the SHA-256 of a file as a RECORD has it."""
    digest = base64.urlsafe_b64encode(bytes.fromhex(file_sha256(file)))
    return f"sha256={digest.rstrip(b'=').decode()}"
