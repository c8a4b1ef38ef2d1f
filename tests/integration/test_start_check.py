"""The environment started as both generations of Triton's launcher start it: a real interpreter, small packages in it."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from support.listener import Listener
from support.small_fixtures import workspace_in
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.report import reporting_to
from vllm_env.layout.archive import unpack
from vllm_env.layout.layout import EnvironmentRecord, Packed
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.layout.tar import contents_of, write_archive
from vllm_env.prefix.relocate import install_runtime, site_packages
from vllm_env.verify.launcher_check import check_start, start
from vllm_env.verify.tree_rules import Expected, check_tree
from vllm_env.verify.verify import opened, verify_tree

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_env.base.workspace import Workspace

PACKAGES = {"numpy": "1.26.4", "torch": "2.13.0", "vllm": "0.32.0", "setuptools": "80.9.0"}
EXPECTED = Expected("3.11", "24.10", PACKAGES, complete=True)


def _add(prefix: Path, name: str, version: str, source: str) -> None:
    """Place a module and its distribution's metadata, as the installation of a wheel leaves them."""
    packages = site_packages(prefix)
    info = packages / f"{name}-{version}.dist-info"
    for folder in (packages / name, info):
        folder.mkdir()
    (packages / name / "__init__.py").write_text(source, "utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")


@pytest.fixture
def prefix(bare_prefix: Path, tmp_path: Path) -> Path:
    """A prefix of the test's own; its torch imports setuptools, as torch.utils.cpp_extension does."""
    own = tmp_path / "env"
    shutil.copytree(bare_prefix, own, symlinks=True)
    install_runtime(own, "a" * 64)
    for name, version in PACKAGES.items():
        imports = "import setuptools\n" if name == "torch" else ""
        _add(own, name, version, f"{imports}__version__ = {version!r}\n")
    return own


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """An empty cache and no network."""
    return workspace_in(tmp_path / "cache")


@pytest.fixture
def unpacked(prefix: Path, workspace: Workspace, tmp_path: Path) -> Path:
    """The same after conda-pack and libarchive, in a folder whose name has a space."""
    archive, environment = tmp_path / "vllm_env.tar.gz", tmp_path / "python env" / "0"
    write_archive(contents_of(prefix), archive)
    unpack(archive, environment)
    shutil.rmtree(prefix)
    return environment


def test_starts_under_both_generations_of_the_launcher(unpacked: Path, workspace: Workspace) -> None:
    """An unpacked archive imports in the C locale, sourced or not, from itself alone, and hands UTF-8 to its children."""
    check_tree(unpacked, EXPECTED)
    sourced = check_start(workspace, unpacked, EXPECTED)
    bare = check_start(workspace, unpacked, replace(EXPECTED, release="25.08"))
    for started in (sourced, bare):
        assert started.encoding == "UTF-8"
        assert started.prefix == str(unpacked)
        assert started.environment["PYTHONUTF8"] == "1"
        assert started.environment["PATH"].split(os.pathsep)[0] == f"{unpacked}/bin"
        assert "PYTHONPATH" not in started.environment
        assert "LD_LIBRARY_PATH" not in started.environment
        assert set(started.imported) == {"numpy", "torch", "vllm"}
    assert sourced.environment["CONDA_PREFIX"] == str(unpacked)
    assert "CONDA_PREFIX" not in bare.environment
    assert bare.environment["VIRTUAL_ENV"] == str(unpacked)
    assert list(workspace.cache.path("build").iterdir()) == []


def test_refuses_an_environment_without_its_hook(prefix: Path, workspace: Workspace) -> None:
    """Without 00_vllm_env.pth the planted PYTHONPATH shadows numpy; without that too, files are read as ASCII."""
    (site_packages(prefix) / "00_vllm_env.pth").unlink()
    with pytest.raises(CommandError, match=r"00_vllm_env\.pth did not run"):
        start(workspace, prefix, ("numpy",), activates=False)
    started = start(workspace, prefix, (), activates=False)
    assert started.encoding == "ANSI_X3.4-1968"
    assert any(path.endswith("/foreign") for path in started.path)


def test_refuses_another_version_than_the_locks(prefix: Path, workspace: Workspace) -> None:
    """What numpy says of itself must be what is locked, although its metadata is right."""
    (prefix / "bin" / "activate").touch()
    (site_packages(prefix) / "numpy" / "__init__.py").write_text("__version__ = '1.26.3'\n")
    with pytest.raises(VllmEnvError, match=r"numpy is 1\.26\.3, the lock has 1\.26\.4"):
        check_start(workspace, prefix, EXPECTED)


def test_tells_bytecode_that_does_not_fit_its_source(prefix: Path, workspace: Workspace) -> None:
    """Bytecode of an older source would be compiled again at each start; the probe leaves it as it finds it."""
    source = site_packages(prefix) / "numpy" / "__init__.py"
    subprocess.run([prefix / "bin" / "python", "-I", "-S", "-m", "py_compile", source], check=True)
    assert "numpy" not in start(workspace, prefix, ("numpy",), activates=False).stale
    os.utime(source, (1_577_836_800, 1_577_836_800))
    for _ in range(2):
        assert "numpy" in start(workspace, prefix, ("numpy",), activates=False).stale


def test_an_archive_is_verified_from_its_bytes_to_an_import(prefix: Path, workspace: Workspace, tmp_path: Path) -> None:
    """All checks in the order of their cost; bytecode that is missing is a note and no error; nothing is left behind."""
    archive, console = tmp_path / "vllm_env.tar.gz", Listener()
    contents = contents_of(prefix)
    write_archive(contents, archive)
    layout, packed = LAYOUTS["archive"], Packed(archive, (EnvironmentRecord("vllm_env.tar.gz", members=contents.members),))
    with reporting_to(console), opened(workspace, layout, packed, EXPECTED, None) as tree:
        (note,) = verify_tree(workspace, tree, EXPECTED)
    assert "have no bytecode that fits" in note
    assert console.heard == [
        "unpacked with libarchive",
        "rules of the loader",
        "shared libraries, paths of the build, imports",
    ]
    assert list(workspace.cache.path("build").iterdir()) == []
    more = replace(packed.environment, members=contents.members + 1)
    damaged = opened(workspace, layout, Packed(archive, (more,)), EXPECTED, None)
    with pytest.raises(VllmEnvError, match="cut off between two members"), damaged:
        pytest.fail("it was opened")
    assert list(workspace.cache.path("build").iterdir()) == []


def test_what_is_imported_later_is_verified_too(unpacked: Path, workspace: Workspace) -> None:
    """vLLM starts without its tokenizers, and the first request fails."""
    (site_packages(unpacked) / "tokenizers.py").write_text("1 / 0\n")
    with pytest.raises(VllmEnvError, match="not be able to import tokenizers: ZeroDivisionError"):
        verify_tree(workspace, unpacked, EXPECTED)


def test_a_folder_that_names_the_cache_is_refused(prefix: Path, workspace: Workspace) -> None:
    """Which folders are looked for follows from the cache that is used, and not from the user's."""
    (prefix / "etc").mkdir(exist_ok=True)
    (prefix / "etc" / "tool.conf").write_text(f"home = {workspace.cache.root}/prefixes/x\n")
    with pytest.raises(VllmEnvError, match=rf"etc/tool\.conf \({workspace.cache.root}\)"):
        verify_tree(workspace, prefix, EXPECTED)
