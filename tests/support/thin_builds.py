"""Builds that cost half as much: their interpreter has few modules, and NumPy and setuptools are empty packages.

They are for tests of the build itself, not of the environment that it makes. All stages are real.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import own_place, small_build
from support.chaos_lab import Lab
from support.once import once
from support.repositories import CHECKOUT
from support.wheels import write_wheel
from vllm_env.base.elf import read_dynamic_section
from vllm_env.interpreter.package import LOCAL_BUILD, write_conda_package

if TYPE_CHECKING:
    from support.small_fixtures import Channel

# Imports what uv, the compiling of bytecode, the unpacking of parts and the checks need of an interpreter, and names the files.
_USED = """
import __future__, ctypes, email.parser, encodings.ascii, encodings.idna, encodings.latin_1, encodings.utf_8_sig
import importlib.metadata, importlib.util, json, logging, multiprocessing.connection, multiprocessing.popen_fork, os, pkgutil
import platform, py_compile, queue, runpy, site, socket, struct, subprocess, sys, sysconfig, threading, traceback
import concurrent.futures.thread, fcntl, hashlib, mmap, shutil, tarfile, tempfile, typing, zlib
from collections.abc import Sequence
sysconfig.get_config_vars()
files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
print(json.dumps([file for file in files if file.startswith(sys.prefix)]))
"""
# Newer than any real ones, so that they are chosen; Triton 24.10 takes no NumPy 2. Only verify imports NumPy.
_STANDINS = (("numpy", "1.999.0"), ("numpy", "999.0"), ("setuptools", "9999.0"))


@pytest.fixture(scope="session")
def thin_channel(channel: Channel, bare_prefix: Path) -> Path:
    """A channel folder whose interpreter has little of its standard library; read it, do not change it."""

    def make(root: Path) -> Path:
        folder = root / "channel"
        _copy_used(bare_prefix, root / "tree")
        write_conda_package(root / "tree", folder / "linux-64", name="python", version=channel.layer.python, build=LOCAL_BUILD)
        (folder / "noarch").mkdir()
        job = json.dumps({"kind": "index", "channel": str(folder)})
        variables = {**os.environ, "PYTHONPATH": str(CHECKOUT / "env")}
        subprocess.run(
            [sys.executable, "-m", "vllm_env.interpreter.rattler_worker", job],
            check=True,
            env=variables,
            stdout=subprocess.DEVNULL,
        )
        return folder

    return once("thin_channel", make)


def _copy_used(prefix: Path, tree: Path) -> None:
    """Copy an interpreter with the modules that ``_USED`` imports and the libraries that these need."""
    asked: list[str | Path] = [prefix / "bin/python", "-I", "-B", "-c", _USED]
    files = [Path(file) for file in json.loads(subprocess.check_output(asked, text=True))]
    packages = [
        *prefix.glob("lib/python3*/site-packages/README.txt"),
        # Debian's hook, without the bytecode that another test may have left next to it
        *(path for path in prefix.glob("lib/python3*/dist-packages/*") if path.is_file()),
    ]
    kept = [*files, *prefix.glob("bin/python*"), *packages]
    libraries = list(prefix.glob("lib/libpython*"))
    while libraries:
        kept += libraries
        needed = {name for file in kept if not file.is_symlink() for name in _needed(file)}
        libraries = [path for name in sorted(needed) if (path := prefix / "lib" / name).exists() and path not in kept]
    for file in kept:
        copy = tree / file.relative_to(prefix)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy, follow_symlinks=False)


def _needed(file: Path) -> tuple[str, ...]:
    section = read_dynamic_section(file)
    return tuple(section.needed) if section else ()


@pytest.fixture(scope="session")
def thin_wheels() -> Path:
    """A folder for PIP_FIND_LINKS with empty packages in place of NumPy and setuptools."""

    def make(folder: Path) -> Path:
        folder.mkdir()
        for name, version in _STANDINS:
            write_wheel(folder, name, version, {f"{name}/__init__.py": f'__version__ = "{version}"\n'.encode()})
        return folder

    return once("thin_wheels", make)


def fill_cache(channel: Path, cache: Path) -> None:
    """Begin a cache with a channel of the interpreter."""
    shutil.copytree(channel, cache / "conda" / "channel")


@pytest.fixture
def thin_lab(thin_channel: Path, thin_wheels: Path, small_wheel: Path, tmp_path: Path) -> Lab:
    """An empty repository and a cache that has the interpreter."""
    fill_cache(thin_channel, tmp_path / "cache")
    return make_thin_lab(tmp_path, small_wheel, thin_wheels)


def make_thin_lab(place: Path, wheel: Path, standins: Path) -> Lab:
    """A lab whose builds take the stand-ins; its cache has no interpreter yet."""
    return Lab(place, small_build.make_spec(place / "spec", wheel), variables={"PIP_FIND_LINKS": str(standins)})


@pytest.fixture(scope="session")
def finished_place(thin_channel: Path, thin_wheels: Path, small_wheel: Path) -> Path:
    """The place of a lab with one finished build; next to it is ``finished.txt``, the build's messages. Do not change them."""

    def make(place: Path) -> Path:
        fill_cache(thin_channel, place / "cache")
        messages = make_thin_lab(place, small_wheel, thin_wheels).finish()
        place.with_name("finished.txt").write_text(messages)
        return place

    return once("thin/finished", make)


def finished_lab(finished: Path, place: Path, wheel: Path, standins: Path) -> Lab:
    """A lab of a test's own that begins where ``finished_place`` ended."""
    lab = make_thin_lab(place, wheel, standins)
    for name in ("cache", "models"):
        own_place.copy(finished / name, place / name, link=False)
    lab.temporary.mkdir()
    return lab
