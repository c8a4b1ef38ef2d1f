"""No module of the model, the packager, the client or the benchmarks imports itself by way of others, not even for a type."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "model": "model_repository/vllm/1/triton_vllm",
    "packager": "env/vllm_env",
    "benchmarks": "benchmarks/harness",
    "client": "client/loadtest",
}


def graph(package: Path) -> dict[str, set[str]]:
    """Return the modules of a package that each of them imports, by dotted names."""
    files = {dotted(path, package): path for path in package.rglob("*.py")}
    return {name: imports(name, path, files.keys()) - {name} for name, path in files.items()}


def dotted(path: Path, package: Path) -> str:
    """Return a module's dotted name; a package's `__init__` has the package's name."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(name: str, path: Path, known: AbstractSet[str]) -> set[str]:
    """Return the known modules that a module imports; from a package those of its modules that are named."""
    own = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = own.split(".")[: len(own.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            whole = {f"{base}.{alias.name}" for alias in node.names}
            found |= (whole & known) or {base}
    return found & known


@pytest.mark.parametrize("package", PACKAGES)
def test_there_is_no_circle(package: str) -> None:
    """The error names the modules."""
    arrows = graph(ROOT / PACKAGES[package])
    assert any(arrows.values())
    graphlib.TopologicalSorter(arrows).prepare()
