"""A model's folder as a build publishes it: an interpreter, and wheels of a few lines with the names of large ones."""

from __future__ import annotations

import base64
import hashlib
import shutil
from typing import TYPE_CHECKING

import pytest

from support.repositories import CHECKOUT
from support.small_build import small_lock
from support.small_fixtures import copy_slim, workspace_in
from vllm_env.base.filesystem import file_sha256
from vllm_env.layout import parts
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.model.manifest import Manifest, StubRecord, VllmRecord
from vllm_env.prefix.prefix import Prefix
from vllm_env.prefix.relocate import install_runtime, make_relocatable, set_times, site_packages

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SITE = "lib/python3.11/site-packages"
LINE = "NAME = 1\n"
WHEELS: Mapping[str, tuple[str, ...]] = {
    "torch": ("nvidia-cublas-cu13==13.0", "numpy"),
    "nvidia-cublas-cu13": (),
    "nvidia-cutlass-dsl": (),
    "numpy": (),
    "vllm": ("torch", "nvidia-cutlass-dsl"),
}
"""The wheels by name, with what each requires."""


def make_prefix(bare_prefix: Path, prefix: Path) -> Path:
    """Make a prefix with the start-up hook, the wheels, their bytecode and a program; return it."""
    copy_slim(bare_prefix, prefix)
    install_runtime(prefix, "identity")
    for name, requires in WHEELS.items():
        add_wheel(prefix, name, requires)
    (prefix / "bin/ray").write_text("#!/bin/sh\necho started\n")
    (prefix / "bin/ray").chmod(0o755)
    make_relocatable(prefix, site_packages(prefix))
    set_times(prefix)
    return prefix


def add_wheel(prefix: Path, name: str, requires: tuple[str, ...] = (), *, version: str = "1.0", line: str = LINE) -> None:
    """Install a wheel with one module, as uv does, and compile it; also over another version of it."""
    module = name.replace("-", "_")
    packages = prefix / SITE
    for old in packages.glob(f"{module}-*.dist-info"):
        shutil.rmtree(old)
    info = packages / f"{module}-{version}.dist-info"
    files = {
        packages / module / "__init__.py": line * 9_000,
        info / "METADATA": f"Name: {name}\nVersion: {version}\n" + "".join(f"Requires-Dist: {text}\n" for text in requires),
    }
    rows = []
    for file, text in files.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{file.relative_to(packages)},sha256={digest},{len(text)}\n")
    bytecode = packages / module / "__pycache__/__init__.cpython-311.pyc"
    bytecode.parent.mkdir(exist_ok=True)
    bytecode.write_text(f"bytecode of {line}")
    (info / "RECORD").write_text("".join([*rows, f"{info.name}/RECORD,,\n"]))


def publish(prefix: Path, layout: str, place: Path, *, name: str = "vllm", release: str = "24.10") -> Path:
    """Write a prefix into ``place/models/NAME``, with code, settings and a manifest; return that folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "_PART_BYTES", 100_000)
        packed = LAYOUTS[layout].pack(workspace_in(place / "cache"), Prefix(prefix, "key", small_lock(), (), reused=False))
    folder = place / "models" / name
    (folder / "1").mkdir(parents=True)
    LAYOUTS[layout].place(packed.path, folder)
    (folder / "1/model.py").write_text("CODE = 1\n")
    config = (CHECKOUT / "model_repository/vllm/config.pbtxt").read_text("utf-8")
    (folder / "config.pbtxt").write_text(config.replace("vllm_env.tar.gz", LAYOUTS[layout].environment), "utf-8")
    (folder / "vllm_engine_args.json").write_text('{"model": "facebook/opt-125m"}\n')
    (folder / "vllm_env.cdx.json").write_text("{}\n")
    stub = folder / "triton_python_backend_stub"
    stub.write_text("stub")
    stub.chmod(0o755)
    manifest = Manifest(
        "k", layout, VllmRecord("0.99.0+cpu", "", "vllm", "release"), "3.11.7", {}, release,
        packed.records, StubRecord(file_sha256(stub), 4, "3.11", release, "prebuilt"),
        spec={"profile": "cpu"}, lock_digest="c", left_out=(), built_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    (folder / "vllm_env.json").write_text(manifest.to_json())
    return folder
