"""What a model's folder is after it has been in an object store."""

from __future__ import annotations

import shutil
from pathlib import Path


def as_from_bucket(folder: Path) -> None:
    """Change a folder to what Triton's core makes of it when it copies it from a bucket.

    Modes and links are lost (filesystem/implementations/s3.h of triton-inference-server/core). Programs that fill a bucket copy
    what a link leads to, by default.
    """
    for link in [path for path in folder.rglob("*") if path.is_symlink()]:
        target = link.resolve()
        link.unlink()
        shutil.copytree(target, link) if target.is_dir() else shutil.copyfile(target, link)
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o644)
