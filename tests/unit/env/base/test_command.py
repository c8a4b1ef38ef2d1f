"""Both doors: a checkout's script and an installed wheel's command. What the user reads names the one that was used."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import vllm_env

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(vllm_env.__file__).parent
READ = """\
from vllm_env.base.driver import complaint
from vllm_env.base.errors import REBUILD_REMEDY, SPACE_REMEDY
from vllm_env.cli.parser import parse
from vllm_env.base.errors import UsageError
print(REBUILD_REMEDY, SPACE_REMEDY, complaint("12.2", "535", "13.0")[1], sep="\\n")
try:
    parse(["verify", "--bogus"])
except UsageError as error:
    print(error)
parse(["--help"])
"""
"""Prints messages and the help."""


@pytest.mark.long
@pytest.mark.parametrize("is_wheel", [False, True])
def test_messages_and_the_help_name_the_door(is_wheel: bool, tmp_path: Path) -> None:
    """A wheel contains the folder `checkout`."""
    shutil.copytree(PACKAGE, tmp_path / "env/vllm_env", ignore=shutil.ignore_patterns("__pycache__", "checkout"))
    if is_wheel:
        (tmp_path / "env/vllm_env/checkout").mkdir()
    command, other = ("vllm-env", "gen_vllm_env.sh") if is_wheel else ("./gen_vllm_env.sh", "vllm-env ")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "env")}
    out = subprocess.run([sys.executable, "-c", READ], env=env, capture_output=True, text=True, check=True).stdout
    program = command.removeprefix("./")
    for text in (
        f"Build it again: {command}, with",
        f"({command} clean)",
        f"Build it with {command} --cuda 12.9",
        f"See {program} verify --help.",
        f"usage: {program} [SUBCOMMAND]",
        f"\n  {command} --dry-run            ",
        f"\n  {command} --profile cuda",
    ):
        assert text in out
    assert other not in out


def test_only_one_module_names_a_door() -> None:
    """Others take it from there. A lock is the exception: it must not depend on the door."""
    named = [where for file in PACKAGE.rglob("*.py") for where in _names(file)]
    assert sorted(named) == ["base/command.py './gen_vllm_env.sh'", "lock/pylock.py 'gen_vllm_env.sh --upgrade'"]


def _names(file: Path) -> Iterator[str]:
    """Yield the strings of a module that name the checkout's script; docstrings are for us."""
    tree = ast.parse(file.read_text("utf-8"))
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and "gen_vllm_env.sh" in str(node.value) and id(node) not in texts:
            yield f"{file.relative_to(PACKAGE)} {node.value!r}"
