"""Writes small wheels of made-up packages."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from typing import TYPE_CHECKING

from vllm_env.base.filesystem import file_sha256
from vllm_env.lock.pylock import LockedWheel

if TYPE_CHECKING:
    from pathlib import Path


def write_wheel(
    folder: Path, name: str, version: str, files: dict[str, bytes], requires: tuple[str, ...] = (), extras: tuple[str, ...] = ()
) -> LockedWheel:
    """Write a wheel and return it as it stands in a lock; ``requires`` are its dependencies, ``extras`` the names of its own."""
    info = f"{name}-{version}.dist-info"
    fields = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"]
    fields += [f"Provides-Extra: {extra}\n" for extra in extras]
    fields += [f"Requires-Dist: {text}\n" for text in requires]
    content = {
        **files,
        f"{info}/METADATA": "".join(fields).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for path, data in content.items()
    ]
    file = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, data in content.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]) + "\n")
    return LockedWheel(name, version, file.name, file_sha256(file), url=file.as_uri())
