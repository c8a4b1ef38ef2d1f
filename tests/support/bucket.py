"""What a model's folder is after it has been in an object store, and a server of that."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from support.parts_fixtures import server_of
from support.serving import behind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.serving import Parts
    from vllm_env.serve.server import TritonServer

_TRITONS_USER = 1000  # in its containers
_AS_TRITONS_USER = """\
export TMPDIR="$1" HOME="$1" XDG_CACHE_HOME="$1"
user=$2
shift 2
exec setpriv --reuid="$user" --regid="$user" --clear-groups "$@"
"""


@contextmanager
def from_bucket(parts: Parts, models: Path) -> Iterator[TritonServer]:
    """Yield a server of a repository that has been in a bucket; it is not started yet.

    It runs as Triton's own user, to whom the copy belongs. Only root can become that user; any other is like it.
    """
    with tempfile.TemporaryDirectory(prefix="vllm_env_test_") as name:
        folder = Path(name)
        folder.chmod(0o755)  # for that user
        bucket = shutil.copytree(models, folder / "models", symlinks=True)
        lose_modes_and_links(bucket)
        own = folder / "own"
        own.mkdir()
        if os.geteuid() == 0:
            for path in (own, bucket, *bucket.rglob("*")):
                os.chown(path, _TRITONS_USER, _TRITONS_USER)
            parts = behind(parts, folder, _AS_TRITONS_USER, own, _TRITONS_USER)
        yield server_of(parts, bucket, {"VLLM_ENV_UNPACKED": str(own / "unpacked")}, folder / "log")


def lose_modes_and_links(folder: Path) -> None:
    """Change a folder to what Triton's core makes of it when it copies it from a bucket.

    Modes and links are lost (filesystem/implementations/s3.h of triton-inference-server/core). Programs that fill a bucket copy
    what a link leads to, by default.
    """
    for link in [path for path in folder.rglob("*") if path.is_symlink()]:
        target = link.resolve()
        link.unlink()
        shutil.copytree(target, link) if target.is_dir() else shutil.copyfile(target, link)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o644)
