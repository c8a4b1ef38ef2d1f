"""Each patch of something private of vLLM, torch or Python is marked; tools/reference.py lists them in docs/vllm_versions.md."""

from __future__ import annotations

import re
from pathlib import Path

from support.patch_probes import PROBES
from unit.test_effects import PATCH, effects

ROOT = Path(__file__).resolve().parents[2]
# How Python starts: a new vLLM changes nothing there (tests/integration/test_interpreter.py, tests/e2e/test_parts.py).
STARTS = {"debian_site.py", "node.py", "parts_unpack.py"}
FOLDERS = (ROOT / "model_repository" / "vllm" / "1", ROOT / "env" / "vllm_env")


def marked() -> set[tuple[str, str]]:
    """Return the patches and the modules whose comments name them."""
    return {
        (name, module.name)
        for folder in FOLDERS
        for module in folder.rglob("*.py")
        for name in re.findall(r"^ *# Patch ([a-z-]+):", module.read_text("utf-8"), re.MULTILINE)
    }


def test_each_patch_has_a_probe() -> None:
    """It shows whether the pinned vLLM still needs the patch (`tests/e2e/test_patches.py`)."""
    assert {name for name, _ in marked()} == set(PROBES)


def test_a_module_that_patches_says_so() -> None:
    """`setattr` on a module, or an assignment to something imported."""
    modules = [module for folder in FOLDERS for module in folder.rglob("*.py")]
    patching = {module.name for module in modules if PATCH in effects(module.read_text("utf-8"))}
    assert patching - {module for _, module in marked()} == STARTS
