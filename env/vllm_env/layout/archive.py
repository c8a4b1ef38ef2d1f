"""Packs a prefix with conda-pack.

conda-pack decides what goes into the archive and checks that the prefix can be packed at all (no editable installs, no
files missing); the bytes are written by :mod:`vllm_env.layout.tar`, in parallel and the same for the same prefix.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from conda_pack import CondaEnv
from conda_pack.core import CondaPackException, Packer

from vllm_env.base.cache import key_of, touch
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import require_space
from vllm_env.base.workspace import Workspace
from vllm_env.prefix.prefix import Prefix

from .tar import Piece, TarPlan, compress_chunk

_FORMAT = 4  # raise it when the bytes of an archive change
_MOST_WORKERS = 16  # each has a chunk in memory and two on their way; the disk is the limit before that
# Nobody runs conda-unpack under Triton, and there is nothing for it to do: no file holds the prefix's place.
LEFT_OUT = frozenset({"bin/conda-unpack", "bin/conda_unpack_progress.py"})


@dataclass(frozen=True)
class Archive:
    """A finished ``.tar.gz``: its SHA-256, size in bytes, and the number of members and bytes that it unpacks to."""

    path: Path
    sha256: str
    size: int
    members: int
    unpacked: int
    reused: bool = False


def archive_key(prefix_key: str) -> str:
    """Return the content key of the archive of a prefix with this key."""
    return key_of(_FORMAT, prefix_key)


def make_archive(workspace: Workspace, prefix: Prefix) -> Archive:
    """Return the archive of a prefix from the cache, or pack it; VllmEnvError if there is too little space for it."""
    key = archive_key(prefix.key)
    target = workspace.cache.path("archives", f"{key}.tar.gz")
    facts = target.with_name(f"{key}.json")  # the name by which the cache finds the pair
    known = json.loads(facts.read_text()) if facts.is_file() else {}
    if target.is_file() and target.stat().st_size == known.get("size"):
        # not the archive: repositories hold links to it, and Triton extracts again when its time changes
        touch(facts)
        return Archive(target, **known, reused=True)
    plan = plan_archive(prefix.path)
    require_space(workspace.cache.root, plan.size // 2, "the archive")
    with workspace.cache.staging() as staging:
        temporary = staging / target.name
        digest = write_archive(plan, temporary, workspace.console.step)
        archive = Archive(target, digest, temporary.stat().st_size, plan.members, plan.size)
        known = {k: v for k, v in dataclasses.asdict(archive).items() if k not in ("path", "reused")}
        (staging / facts.name).write_text(json.dumps(known))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.replace(target)
        (staging / facts.name).replace(facts)
    return archive


def plan_archive(prefix: Path, into: TarPlan | None = None) -> TarPlan:
    """Let conda-pack name the members of a prefix's archive; VllmEnvError if it refuses, as it does an editable package."""
    plan = into or TarPlan(left_out=LEFT_OUT)
    try:
        environment = CondaEnv.from_prefix(str(prefix), on_missing_cache="ignore")
        packer = Packer(str(prefix), plan)
        for file in environment:
            # relocate.py has taken the prefix out of the files, so conda-pack need not read each one to look for it
            file.source = os.path.join(prefix, file.target)  # noqa: PTH118 - not the package cache's copy
            if not file.target.startswith("conda-meta/"):
                file.file_mode = None
            packer.add(file)
        for bytecode in _unlisted_bytecode(prefix, {file.target for file in environment}):
            plan.add(str(prefix / bytecode), bytecode)
        packer.finish()
    except CondaPackException as error:
        remedy = "Install packages as wheels, not as editable."
        raise VllmEnvError("conda-pack refuses the environment.", cause=str(error).strip(), remedy=remedy) from error
    return plan


def _unlisted_bytecode(prefix: Path, listed: set[str]) -> list[str]:
    """Return the bytecode that conda-pack leaves out, relative to the prefix.

    It takes bytecode beside a conda package's sources for conda's own, which is made when a package is installed, and
    drops it (core.py, ``find_py_source``); the standard library would be compiled again at every start.
    """
    found: set[str] = set()
    for folder, _, files in os.walk(prefix / "lib"):
        if folder.endswith("/__pycache__"):
            found.update(f"{folder[len(str(prefix)) + 1 :]}/{name}" for name in files if name.endswith(".pyc"))
    return sorted(found - listed)


def write_archive(plan: TarPlan, target: Path, step: Callable[[str, float], None] = lambda _text, _done: None) -> str:
    """Write a planned archive and return its SHA-256; all cores compress."""
    chunks = plan.chunks()
    digest = hashlib.sha256()
    workers = min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool, target.open("wb") as sink:
        try:
            for number, member in enumerate(_in_order(pool, chunks, 3 * workers), 1):
                sink.write(member)
                digest.update(member)
                step(f"{sink.tell() / 1e6:.0f} MB", number / len(chunks))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # nobody wants what is still in the queue
            raise
        sink.flush()
        os.fsync(sink.fileno())
    return digest.hexdigest()


def _in_order(pool: concurrent.futures.Executor, chunks: list[list[Piece]], ahead: int) -> Iterator[bytearray]:
    """Yield the compressed chunks in order, with no more than ``ahead`` of them waiting in memory."""
    pending = []
    for chunk in chunks:
        pending.append(pool.submit(compress_chunk, chunk))
        if len(pending) >= ahead:
            yield pending.pop(0).result()
    for future in pending:
        yield future.result()
