"""A lane for tests whose subject is Triton, its stub or our own code, and which would pass with any model.

They run against the real tritonserver, the real stub and the real ``model_repository/vllm/1``. Only vLLM is another one: the
package ``vllm`` of this folder has no EngineCore and needs no torch, so a start takes two seconds instead of fourteen. Tests
of the engine's own doings (its faults, its death, its memory, its answers) belong to the real vLLM.

The same tests run with the real vLLM under ``--slow``: see ``support.light_fixtures``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from support import fake_vllm, small_build
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterable

GATE = "ENGINELESS_GATE"
"""A variable of the server: the engine's start waits until there is this file."""
TAKEN = frozenset({"dtype", "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes", "max_model_len", "max_num_seqs"})
"""Engine arguments that it takes, of those that a machine may give to all models."""
_TWO_PARTS = 150 << 20  # bytes, more than one part holds
_PACKAGE = Path(__file__).with_name("vllm")
# What the adapter and the start-up hook import; with all of site-packages the stub would find the real vLLM's requirements.
_HOOK = ("00_vllm_env.pth", "_vllm_env_runtime.py", "_vllm_env_variables.txt")
_REQUIRED = ("numpy", "prometheus_client", "psutil", "uvloop")
_LINKED = (*_HOOK, *_REQUIRED, "numpy.libs")


def make_environment(real: Path, folder: Path) -> Path:
    """Make an environment for EXECUTION_ENV_PATH that has this folder's vLLM, and return its folder.

    Args:
        real: the unpacked environment with the real vLLM; its files are linked.
        folder: the new environment, which must not exist.
    """
    (python,) = real.glob("lib/python3.*")
    site = folder / "lib" / python.name / "site-packages"
    site.mkdir(parents=True)
    _link((path for path in real.iterdir() if path.name not in ("lib", "bin")), folder)
    _link((path for path in (real / "lib").iterdir() if path != python), folder / "lib")
    _link((path for path in python.iterdir() if path.name != "site-packages"), site.parent)
    _link((python / "site-packages" / name for name in _LINKED), site)
    # Python finds its prefix from where its program lies once links are followed: so no links here.
    shutil.copytree(real / "bin", folder / "bin", symlinks=True)
    write_package(site)
    return folder


def write_package(site: Path) -> None:
    """Write the package ``vllm`` into a folder for packages."""
    package = site / "vllm"
    shutil.copytree(_PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(fake_vllm.__file__, package / "_names.py")  # the same vLLM as in unit tests
    (package / "_facts.json").write_text(json.dumps(FACTS), encoding="utf-8")


def make_wheel(folder: Path) -> Path:
    """Build a wheel of the package ``vllm``, for an environment that the packager makes; in parts, it has several."""
    tree = small_build.make_tree(folder / "tree", requirements=_REQUIRED)
    shutil.rmtree(tree / "vllm")
    write_package(tree)
    (tree / "vllm" / "_padding.json").write_bytes(bytes(_TWO_PARTS))
    return small_build.make_wheel(folder, tree)


def _link(files: Iterable[Path], folder: Path) -> None:
    for file in files:
        if file.exists():
            (folder / file.name).symlink_to(file)
