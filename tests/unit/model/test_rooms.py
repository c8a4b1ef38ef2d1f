"""What a module of `triton_vllm` may import late, and what it needs to be imported."""

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
TRITON = {"base.triton", "service", "startup.load", "request.admit"}
"""These need Triton's module, which only the stub has."""
HEAVY = {"vllm", "torch", "transformers", "uvloop", "uvicorn", "prometheus_client", "cv2"}
HEAVY |= {"uvicorn.protocols.http.httptools_impl", "triton_vllm.service", "triton_vllm.openai.start"}
"""These may be imported inside a function: they take long, or may be absent."""


def imports(path, *, inside=False):
    """Return the modules that a module imports; `inside` functions only, if asked for."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    nodes = [n for f in functions for n in ast.walk(f)] if inside else list(ast.walk(tree))
    found: set[str | None] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (whole & MODULES.keys()) or {node.module}
    return found


def test_only_what_is_heavy_or_optional_is_imported_in_a_function():
    """Else what a module needs could not be read off its first lines."""
    late = {module: imports(path, inside=True) - HEAVY for module, path in MODULES.items()}
    assert {module: names for module, names in late.items() if names} == {}


def test_every_module_imports_without_vllm_and_all_but_a_few_without_triton():
    """The server loads model.py in a process that only completes the configuration."""
    wanted = [name for name in MODULES if name.removeprefix("triton_vllm.") not in TRITON]
    code = f"import sys; sys.modules['vllm'] = sys.modules['triton_python_backend_utils'] = None; import {', '.join(wanted)}"
    subprocess.run([sys.executable, "-c", code], cwd=PLACE, check=True, timeout=300)


def test_without_a_port_nothing_of_the_openai_server_is_imported():
    """Neither this project's part of it nor what it needs."""
    code = (
        "import sys, unittest.mock as m; sys.modules['triton_python_backend_utils'] = m.MagicMock(); import triton_vllm.service; "
    )
    code += "print([name for name in sys.modules if name.startswith(('triton_vllm.openai', 'uvicorn', 'fastapi'))])"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=PLACE, check=True, timeout=300, capture_output=True, text=True)
    assert done.stdout == "[]\n"
