"""The rooms of `triton_vllm` are joined one way: who opens the folder sees the way that a request takes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PLACE = Path(__file__).parents[3] / "model_repository" / "vllm" / "1"
PACKAGE = PLACE / "triton_vllm"
MODULES = {
    ".".join(path.relative_to(PLACE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
}
# A room may import from those after it, and from the modules that belong to none.
ROOMS = ("loading", "admission", "inference", "delivery", "compat")
# Only these may be imported by a room besides.
SHARED = {"coerce", "contract", "errors", "job", "metrics", "official", "protocols", "request", "transport"}
# These belong to no room and may import from all.
ABOVE_THE_ROOMS = {"triton_vllm.service", "triton_vllm.job", "triton_vllm.transport"}
TRITON = {"transport", "service", "loading.load", "admission.admit"}
"""These need Triton's module, which only the stub has."""
HEAVY = {"vllm", "torch", "transformers", "uvloop", "prometheus_client", "cv2", "triton_vllm.service"}
"""These may be imported inside a function: they take long, or may be absent."""


def imports(path, *, inside=False):
    """Return the modules that a module imports; `inside` functions only, if asked for."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    nodes = [n for f in functions for n in ast.walk(f)] if inside else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (whole & MODULES.keys()) or {node.module}
    return found


def room(module):
    return module.split(".")[1] if module.count(".") > 1 else ""


GRAPH = {module: imports(path) & MODULES.keys() for module, path in MODULES.items()}


def test_the_check_sees_the_imports():
    """A graph without arrows would pass every test below."""
    found = {room(other) for others in GRAPH.values() for other in others}
    assert found == {*ROOMS, ""}


def test_no_module_imports_itself_by_way_of_others():
    """Also not where only a type is needed."""

    def reach(module, seen=()):
        for other in GRAPH[module]:
            assert other not in seen, f"circle: {' -> '.join((*seen, module, other))}"
            reach(other, (*seen, module))

    for module in GRAPH:
        reach(module)


def test_a_room_imports_only_from_those_after_it():
    """Loading knows all others, delivery none; what belongs to no room knows only what is shared, or is the service."""
    arrows = [(module, other) for module in GRAPH for other in GRAPH[module]]
    assert [f"{module} imports {other}" for module, other in arrows if not allowed(module, other)] == []


def allowed(module, other):
    if not room(other):
        return other.removeprefix("triton_vllm.") in SHARED
    if not room(module):
        return module in ABOVE_THE_ROOMS
    return ROOMS.index(room(module)) <= ROOMS.index(room(other))


def test_only_what_is_heavy_or_optional_is_imported_in_a_function():
    """Else what a module needs could not be read off its first lines."""
    late = {module: imports(path, inside=True) - HEAVY for module, path in MODULES.items()}
    assert {module: names for module, names in late.items() if names} == {}


def test_every_module_imports_without_vllm_and_all_but_a_few_without_triton():
    """The server loads model.py in a process that only completes the configuration."""
    wanted = [name for name in MODULES if name.removeprefix("triton_vllm.") not in TRITON]
    code = f"import sys; sys.modules['vllm'] = sys.modules['triton_python_backend_utils'] = None; import {', '.join(wanted)}"
    subprocess.run([sys.executable, "-c", code], cwd=PLACE, check=True, timeout=300)
