"""Get the files that a lock names from whichever index has them: the hash decides, not the order.

uv takes a version from the first index that has it, even if the locked file is in another one, and
then stops at the wrong hash. So whatever uv or pip does not get is asked for by its hash, first
from all sources at once, then from each one alone.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from vllm_env.base import report
from vllm_env.base.command import COMMAND
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.network import RefusedError
from vllm_env.base.sources import Source, masked, pip_settings
from vllm_env.base.workspace import Workspace

from .commits import variant_index
from .platforms import pip_options, tags_of
from .pylock import PYTORCH_INDEX, VLLM_INDEX, Lock, LockedWheel

PIP_RULES = ("--no-deps", "--require-hashes", "--only-binary", ":all:")
"""pip's options for the wheels of a lock."""
_REMEDY = (
    "Check these indexes (pip config list). If none of them should have the file, "
    "--upgrade resolves again, which may give other versions."
)


def by_hash(
    workspace: Workspace,
    lock: Lock,
    folder: Path,
    attempt: Callable[[Sequence[LockedWheel]], None],
) -> None:
    """Run uv or pip for the lock's wheels; fetch those that it does not find, and run it again.

    Args:
        workspace: the cache and the network.
        lock: its wheels.
        folder: gets the fetched files.
        attempt: runs uv or pip. It gets the wheels, the fetched ones with their file as ``url``.

    Raises:
        VllmEnvError: no source has a wheel, or ``attempt`` failed for another reason.
    """
    wheelhouse = workspace.network.wheelhouse
    wheels = list(lock.wheels)
    # Each round fetches at least one wheel, so the loop ends.
    while True:
        try:
            return attempt(wheels)
        except CommandError as error:
            missing = _wheels_named_in(error, wheels)
            if not missing:
                raise
            if wheelhouse:
                absent = [wheel for wheel in missing if not _has(wheelhouse, wheel)]
                if absent:
                    raise _not_in(wheelhouse, absent[0]) from error
                # The wheelhouse has all of them, so uv or pip has failed for another reason, such
                # as a file that cannot be unpacked.
                raise
            if workspace.network.offline:
                raise
            for wheel in missing:
                report.note(f"{wheel.file}: not found at once; every index is asked for this hash")
                file = _fetch(workspace, lock, wheel, folder)
                wheels[wheels.index(wheel)] = replace(wheel, url=file.as_uri())


def _wheels_named_in(error: CommandError, wheels: Sequence[LockedWheel]) -> list[LockedWheel]:
    """Return the wheels that the output of uv or pip names, without those that have a file."""
    # An error with a known cause is not about single wheels: no host answers, or the disk is full.
    # Only a refusal may be.
    if error.cause and not isinstance(error, RefusedError):
        return []
    # Only names count, because the programs' sentences change with their versions: a requirement,
    # a page of an index, a file.
    return [
        wheel
        for wheel in wheels
        if not wheel.url
        and re.search(
            rf"(?<![\w.-]){re.escape(wheel.name)}==|/{re.escape(wheel.name)}/"
            rf"|{re.escape(wheel.file)}",
            error.tail,
        )
    ]


def _fetch(workspace: Workspace, lock: Lock, wheel: LockedWheel, folder: Path) -> Path:
    """Fetch a wheel into a folder, from whichever source has the file with its hash.

    Raises:
        CommandError: no source has it; the cause is what each of them has.
    """
    is_torch = wheel.index == PYTORCH_INDEX
    sources = workspace.network.sources(lock.spec.torch_backend if is_torch else "")
    if wheel.index == VLLM_INDEX:
        sources.append(Source(variant_index(lock.spec)))
    answers = []
    alone = [[source] for source in sources]
    # First ask all sources at once: among them, pip prefers the right hash. It cannot where the
    # page of an index has no hashes, and a folder never has any. Then ask each source alone.
    for asked in [sources, *alone] if len(sources) > 1 else alone:
        with workspace.cache.staging() as staging:
            answer = _download_from(workspace, lock, wheel, asked, staging)
            file = staging / "wheels" / wheel.file
            if file.is_file():
                folder.mkdir(parents=True, exist_ok=True)
                return file.rename(folder / wheel.file)
        # Of all sources at once, pip's output does not say which one answered what.
        if asked is not sources:
            answers.append(f"{asked[0].name} {answer}")
    raise CommandError(
        f"No index has the locked file {wheel.file} with sha256 {wheel.sha256}.",
        cause=f"{'; '.join(answers)}.",
        remedy=_REMEDY,
    )


def _download_from(
    workspace: Workspace, lock: Lock, wheel: LockedWheel, sources: list[Source], staging: Path
) -> str:
    """Have pip download a wheel into ``wheels`` of a staging folder; return what the sources have.

    The answer counts only if the file is not there afterwards. It begins with a verb: "has …".
    """
    empty = staging / "empty"
    empty.mkdir()
    requirements = staging / "requirements.txt"
    requirements.write_text(f"{wheel.requirement}\n", "utf-8")
    lines: list[str] = []
    try:
        workspace.network.pip_command(
            [
                # pip's cache could keep a damaged file of an https index.
                "download", "-vv", "--no-cache-dir", "--retries", "1", *PIP_RULES,
                "--python-version", lock.spec.python,
                *pip_options(lock.spec.target, tags_of([wheel.file])),
                "--dest", staging / "wheels", "--requirement", requirements,
            ],
            f"download {wheel.file}",
            env={"TMPDIR": str(staging), **pip_settings(sources, empty)},
            on_line=lines.append,
        )  # fmt: skip
    except CommandError:
        # The lines about the empty folder are not about these sources.
        output = "\n".join(masked(line) for line in lines if str(empty) not in line)
        return _answer_in(output, wheel)
    # pip has downloaded something. The caller asks for this answer only if it has another name.
    return f"has another file of {wheel.name} {wheel.version}"


def _answer_in(output: str, wheel: LockedWheel) -> str:
    """Return what pip's output says about a source that does not have a wheel."""
    got = re.search(r"from \S*?([^/\s]+\.whl)\S*(?: \(.*\))?:\n.*\n\s+Got\s+([0-9a-f]{64})", output)
    if got:
        file, sha256 = unquote(got[1]), got[2]
        if file == wheel.file:
            return f"has this file damaged or repacked, with sha256 {sha256}"
        return f"has {file} with sha256 {sha256}"
    refusal = re.search(r"Could not fetch URL \S+ (.*?)(?: for url:.*)? - skipping", output)
    if refusal:
        return f"answers {refusal[1]}"
    if "No matching distribution" in output:
        return f"lists no fitting file of {wheel.name} {wheel.version}"
    errors = re.findall(r"^\s*ERROR: (.*)", output, re.MULTILINE) or output.splitlines()[-1:]
    return f"fails: {errors[0].rstrip('.')}" if errors else "fails"


def _has(folder: Path, wheel: LockedWheel) -> bool:
    """Return whether a wheelhouse has a wheel as it is locked."""
    file = folder / wheel.file
    return file.is_file() and file_sha256(file) == wheel.sha256


def _not_in(folder: Path, wheel: LockedWheel) -> VllmEnvError:
    """Return the error for a wheel that a wheelhouse does not have as it is locked."""
    stem = "-".join(wheel.file.split("-")[:2])
    found = [f"{file.name} with sha256 {file_sha256(file)}" for file in folder.glob(f"{stem}-*")]
    return VllmEnvError(
        f"The wheelhouse {folder} does not have the locked file {wheel.file} "
        f"with sha256 {wheel.sha256}.",
        cause=f"It has {', '.join(sorted(found)) or f'no file of {wheel.name}'}.",
        remedy=f"Fill it again with this program: {COMMAND} wheelhouse DIR.",
    )
