"""The environment's own compiler is tried before it is needed on a GPU."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from support.small_fixtures import workspace_in
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.prefix.relocate import COMPILER
from vllm_env.verify.compiler_check import check_compiler


def _environment(folder: Path, script: str) -> Path:
    """An environment whose compiler is a script, with this machine's headers of Python."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / COMPILER).write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / COMPILER).chmod(0o755)
    (folder / "include").mkdir()
    (folder / "include" / "python3.11").symlink_to(sysconfig.get_paths()["include"])
    return folder


def test_a_compiler_that_works_passes(tmp_path: Path) -> None:
    """An extension module with Python.h is compiled by it, and nothing is left."""
    check_compiler(workspace_in(tmp_path / "cache"), _environment(tmp_path / "env", 'exec cc "$@"'))
    assert list((tmp_path / "cache" / "build").iterdir()) == []


def test_a_compiler_that_lacks_its_files_is_refused(tmp_path: Path) -> None:
    """As when a rule has taken away what it reads: its own words are kept, and the rules are named."""
    environment = _environment(tmp_path / "env", "echo no such header >&2; exit 1")
    with pytest.raises(CommandError, match=r"compile launcher\.so with .*vllm-env-cc") as caught:
        check_compiler(workspace_in(tmp_path / "cache"), environment)
    assert "no such header" in caught.value.tail
    assert "--keep" in caught.value.remedy


def test_an_environment_without_headers_is_refused(tmp_path: Path) -> None:
    """Debian's interpreter has them in a package of their own: the first kernel on a GPU would fail."""
    environment = _environment(tmp_path / "env", 'exec cc "$@"')
    (environment / "include/python3.11").unlink()
    (environment / "include/python3.11").mkdir()
    with pytest.raises(VllmEnvError, match=r"no Python\.h") as caught:
        check_compiler(workspace_in(tmp_path / "cache"), environment)
    assert "-dev" in caught.value.remedy


def test_an_environment_without_one_is_fine(tmp_path: Path) -> None:
    """A CPU environment brings none."""
    check_compiler(workspace_in(tmp_path / "cache"), tmp_path)
