"""Checks a small archive with its parts: as Triton starts it, before anything is unpacked, and as a whole by its own code."""

import os
from pathlib import Path

from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import require_space, tree_size
from vllm_env.base.process import run
from vllm_env.base.workspace import Workspace
from vllm_env.inside.parts_unpack import FOLDER, MARK, VARIABLE
from vllm_env.triton.root import TritonRoot

from . import launcher_check, leaked_paths, tree_rules
from .tree_rules import REBUILD, Expected
from .verify import verify_archive, verify_directory

_UNPACK = """
import os, sys
import numpy  # as a stub does before it calls the model
assert "_vllm_env_unpack" not in sys.modules
import _vllm_env_unpack
print(_vllm_env_unpack.use(sys.argv[1]))
"""


def verify_built(
    workspace: Workspace,
    environment: Path,
    expected: Expected,
    triton: TritonRoot | None = None,
    *,
    parts: Path | None = None,
    unpacked: int = 0,
) -> tuple[str, ...]:
    """Check what was built: a folder, an archive, or an archive with the folder of its ``parts``; see ``verify_archive``."""
    if environment.is_dir():
        return verify_directory(workspace, environment, expected)
    if parts:
        return verify_parts(workspace, environment, parts, expected, triton)
    return verify_archive(workspace, environment, expected, triton, unpacked=unpacked)


def verify_parts(
    workspace: Workspace, archive: Path, parts: Path, expected: Expected, triton: TritonRoot | None = None
) -> tuple[str, ...]:
    """Unpack as Triton and then the model's start do, below the cache, and check what comes out as for an archive.

    Returned are notes for the user, as ``verify_archive`` does.

    Raises:
        VllmEnvError: naming the rule and the remedy.
    """
    require_space(workspace.cache.root, 6 * (tree_size(archive) + tree_size(parts)), "unpacking the parts to verify them")
    with workspace.cache.staging() as staging:
        workspace.console.step("unpacked with libarchive")
        small = staging / "0"
        tree_rules.unpack(archive, small, triton.path if triton else None, expected.members)
        leaked_paths.check_leaks(small, leaked_paths.build_places(workspace.cache.root))
        for activates in (True, False):
            started = launcher_check.start(workspace, small, ("numpy",), activates=activates)
            launcher_check.judge(started, small, Expected(expected.python, expected.release, {}))
        workspace.console.step("parts")
        whole = _unpack(small, parts, staging)
        return verify_directory(workspace, whole, expected)


def _unpack(small: Path, parts: Path, staging: Path) -> Path:
    """Let the small archive's own code unpack the parts; return the folder with the whole environment."""
    model = staging / "model"
    model.mkdir()
    (model / FOLDER).symlink_to(parts.resolve())
    variables = {"PATH": os.defpath, "HOME": str(staging / "home"), VARIABLE: str(staging / "unpacked")}
    # -B: bytecode that is written here names this machine's folders, and becomes a part of the whole
    output = run([small / "bin" / "python", "-B", "-c", _UNPACK, model], what="unpack the parts", env=variables, remedy=REBUILD)
    whole = Path(output.splitlines()[-1])
    if not (whole / MARK).is_file():
        raise VllmEnvError("The parts were not unpacked.", cause=output[-400:], remedy=REBUILD)
    return whole
