"""Make the whole environment of a built model in a folder, such as for the workers of Ray."""

import shutil
from pathlib import Path

from vllm_env.base import report
from vllm_env.base.filesystem import require_space, tree_size
from vllm_env.base.new_folder import filled, prepare
from vllm_env.model.manifest import Manifest, check_files
from vllm_env.sketch import installed_triton

# The folder of the environment that is moved into place last: without it, nobody can use the rest.
_LAST = "bin"


def unpack(model: Path, manifest: Manifest, folder: Path) -> Path:
    """Unpack a model's environment into a folder that is missing or empty; return its path.

    The result is the same for every layout, and may be moved to any place on any machine.

    Raises:
        UsageError: the folder is not empty.
        VllmEnvError: a file differs from the manifest, or too little space is free.
    """
    folder = folder.absolute()
    prepare(folder, _LAST)
    with report.stage("unpack"):
        report.step("digests")
        check_files(model, manifest)
        with filled(folder, _LAST) as (made, scratch):
            _unpack_into(made, scratch, model, manifest)
        report.step(str(folder))
    return folder


def _unpack_into(made: Path, scratch: Path, model: Path, manifest: Manifest) -> None:
    """Make a model's environment as the folder ``made``, which must not exist yet.

    Raises:
        VllmEnvError: too little space is free.
    """
    layout, packed = manifest.packed(model)
    # open() yields the parts of an environment as they are unpacked, and the whole one last.
    *_, tree = layout.open(packed, installed_triton(), scratch)
    # The layout has unpacked it, so it need not be copied.
    if tree.path.is_relative_to(scratch):
        tree.path.rename(made)
        return
    # The layout "directory" unpacks nothing. The model keeps its folder.
    require_space(scratch, tree_size(tree.path), "copying the environment")
    shutil.copytree(tree.path, made, symlinks=True)
