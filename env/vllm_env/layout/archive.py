"""The layout ``archive``: one ``vllm_env.tar.gz``, which Triton extracts to /tmp at every load."""

import ctypes.util
import json
import re
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, ClassVar

from vllm_env.base import report
from vllm_env.base.cache import key_of
from vllm_env.base.errors import REBUILD_REMEDY, VllmEnvError
from vllm_env.base.filesystem import link_or_copy, require_space, sync, tree_size
from vllm_env.base.process import run
from vllm_env.base.workspace import Workspace
from vllm_env.prefix.prefix import EXTRACTED_SPACE, Prefix

from .cached import find_packed, keep_packed
from .layout import EnvironmentRecord, Layout, Packed, Tree
from .tar import contents_of, write_archive

_DISK_FULL = "The file system is full."
_FORMAT = 4  # raise it when the bytes of an archive change
# Messages of libarchive and their meaning. They are in its archive_write_disk_posix.c,
# archive_read_support_format_tar.c and archive_read_support_filter_gzip.c.
_MEANING = {
    r"Path contains '\.\.'": (
        "Since 26.06 Triton refuses members whose path contains '..' (SECURE_NODOTDOT)."
    ),
    r"Path is absolute": (
        "Since 26.06 Triton refuses members with an absolute path (SECURE_NOABSOLUTEPATHS)."
    ),
    r"through symlink": (
        "Since 26.06 Triton refuses to write through a symbolic link (SECURE_SYMLINKS)."
    ),
    r"can't be converted": (
        "tritonserver runs in the C locale, in which libarchive cannot convert this name."
    ),
    r"[Tt]runcated|premature end|Damaged tar|invalid compressed|decompression failed": (
        "The archive is cut off or damaged."
    ),
    r"Unrecognized archive format": (
        "Triton reads tar archives, compressed with gzip or not at all."
    ),
    # archive_write_disk_posix.c says only this if write(2) fails.
    r"No space left|disk full|Write failed": _DISK_FULL,
}


class Archive(Layout):
    """A single archive."""

    name = "archive"
    environment = "vllm_env.tar.gz"
    files: ClassVar[tuple[str, ...]] = (environment,)

    def key(self, prefix_key: str) -> str:
        """Return the content key of a prefix's archive."""
        return key_of(_FORMAT, prefix_key)

    def pack(self, workspace: Workspace, prefix: Prefix) -> Packed:
        """Return a prefix's archive from the cache, or pack it."""
        key = self.key(prefix.key)
        cached = find_packed(workspace.cache, key, self.files)
        if cached:
            return cached
        contents = contents_of(prefix.path)
        # Half is an estimate.
        require_space(workspace.cache.root, contents.size // 2, "the archive")
        with workspace.cache.staging() as staging:
            file = staging / f"{key}.tar.gz"
            digest = write_archive(contents, file, report.step)
            record = EnvironmentRecord(
                name=self.environment,
                sha256=digest,
                size=file.stat().st_size,
                members=contents.members,
                unpacked=contents.size,
            )
            return keep_packed(workspace.cache, file, (record,))

    def open(
        self, packed: Packed, triton: Path | None, scratch: Path, *, keep: bool = False
    ) -> Generator[Tree, None, None]:
        """Unpack the archive as Triton does."""
        # A manifest may lack the size. Then estimate it.
        unpacked = packed.environment.unpacked or 5 * tree_size(packed.path)
        # A tenth more, for folders and the last blocks of files.
        require_space(scratch, unpacked * 11 // 10, "unpacking the archive")
        report.step("unpacked with libarchive")
        # Triton's name for the folder.
        environment = scratch / "0"
        unpack(packed.path, environment, triton, packed.environment.members)
        yield Tree(environment)

    def place(self, environment: Path, folder: Path, *, linked: bool = False) -> None:
        """Link the archive, or copy it if it is on another file system."""
        place_file(environment, folder / self.environment)

    def bytes_to_copy(self, environment: Path, receiver: Path) -> int:
        """Return 0 if the archive can be a link to the cache's file."""
        if environment.stat().st_dev == receiver.stat().st_dev:
            return 0
        return tree_size(environment)

    def extracted_space(self, profile: str) -> int:
        """Return the size of an extracted environment."""
        return EXTRACTED_SPACE[profile]


def place_file(source: Path, target: Path) -> None:
    """Link or copy a file, and make it readable for every user."""
    link_or_copy(str(source), str(target))
    # Whatever the umask: the server may run as another user.
    target.chmod(0o644)
    sync(target)


def unpack(archive: Path, folder: Path, triton: Path | None = None, members: int = 0) -> None:
    """Unpack an archive as Triton would, with the Triton root's own libarchive if it has one.

    ``members`` is the expected number of members; 0 means unknown.

    Raises:
        VllmEnvError: Triton would refuse the archive, for the reason in the message.
    """
    folder.mkdir(parents=True)
    answer = _unpack_as_triton(archive, folder, triton)
    if "refused" in answer:
        raise _refusal_error(archive, answer["refused"])
    if members and answer["members"] != members:
        raise VllmEnvError(
            f"{archive} holds {answer['members']} members, and not the {members} that were packed.",
            cause="It was cut off between two members. libarchive takes that for its end.",
            remedy=REBUILD_REMEDY,
        )


def _unpack_as_triton(archive: Path, folder: Path, triton: Path | None) -> dict[str, Any]:
    """Run libarchive_worker.py on an archive, and return its answer.

    Returns:
        ``{"members": NUMBER}``, or ``{"refused": …}`` with the answer of its ``Refused``.

    Raises:
        VllmEnvError: there is no libarchive.
    """
    own = sorted(triton.absolute().glob("lib/libarchive*.so.13*")) if triton else []
    library = str(own[0]) if own else ctypes.util.find_library("archive")
    if library is None:
        raise VllmEnvError(
            "The loader's rules cannot be checked: this machine has no libarchive.so.13.",
            remedy="Install it (apt-get install libarchive13), "
            "or run in a Triton container, which has it.",
        )
    packages = Path(__file__).resolve().parents[2]
    variables = {"LIBARCHIVE": library, "PYTHONPATH": str(packages)}
    if own:
        # The libraries that it needs are next to it.
        variables["LD_LIBRARY_PATH"] = str(own[0].parent)
    worker = [sys.executable, "-m", "vllm_env.layout.libarchive_worker"]
    output = run(
        [*worker, archive.resolve(), folder.absolute()],
        what=f"unpack {archive.name} as Triton does",
        env=variables,
        cwd=packages,
    )
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


def _refusal_error(archive: Path, refused: dict[str, Any]) -> VllmEnvError:
    """Return the error for an archive that libarchive refuses, with the message's meaning.

    ``refused`` is the answer of libarchive_worker.py's ``Refused``.
    """
    message = refused["message"]
    # A message may fit several patterns. The first one gives the cause and the remedy.
    meaning = next((text for pattern, text in _MEANING.items() if re.search(pattern, message)), "")
    answer = f"{refused['call']}() answers {refused['status']}: {message}"
    place = f" at {refused['member']}" if refused["member"] else ""
    remedy = REBUILD_REMEDY
    if meaning == _DISK_FULL:
        remedy = "Free some space, or point VLLM_ENV_CACHE to a larger file system."
    return VllmEnvError(
        f"{archive} cannot be unpacked{place}.",
        cause=f"{meaning} {answer}".lstrip(),
        remedy=remedy,
    )
