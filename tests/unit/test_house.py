"""Rules of the structure that import-linter and ruff do not check: sizes, late imports, what rooms say."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PACKAGER = ROOT / "env" / "vllm_env"
PARTS = ("env/vllm_env/**/*.py", "client/**/*.py", "model_repository/vllm/1/**/*.py", "tools/**/*.py")
SOURCES = sorted(file for part in PARTS for file in ROOT.glob(part))
MOST_LINES = 400
MOST_METHODS = 20
LATE = {
    "torch",
    "transformers",
    "tokenizers",
    "vllm",
    "PIL",
    "prometheus_client",
    "uvicorn",
    "uvloop",
    "cv2",
    "psutil",
}  # take seconds, or are in the environment only
LATE |= {"_locale", "_thread", "select", "gc", "_vllm_env_unpack"}  # the start-up hook imports what is loaded already
LATE |= {"atexit", "multiprocessing"}  # and in a child that the stub has spawned what that needs next
LATE |= {"triton_vllm", "loadtest", "tritonclient"}  # need one of the above, or tritonclient, which may be missing
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[str, Function]]:
    """Yield every function of the product with its place."""
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, Function):
                yield f"{file.relative_to(ROOT)}:{node.lineno} {node.name}", node


def test_modules_and_classes_are_short() -> None:
    """At most 400 lines in a module and 20 methods in a class, also in the benchmarks."""
    lines: dict[str, int] = {}
    methods: dict[str, int] = {}
    for file in (*SOURCES, *ROOT.glob("benchmarks/**/*.py")):
        text = file.read_text("utf-8")
        where = str(file.relative_to(ROOT))
        lines[where] = len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                methods[f"{where} {node.name}"] = len([part for part in node.body if isinstance(part, Function)])
    assert lines
    assert methods
    assert {where: count for where, count in lines.items() if count > MOST_LINES} == {}
    assert {where: count for where, count in methods.items() if count > MOST_METHODS} == {}


def test_imports_stand_at_the_top() -> None:
    """Inside a function only what is heavy or optional is imported."""
    found = []
    for where, node in functions():
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                names = [a.name for a in inner.names] if isinstance(inner, ast.Import) else [inner.module or ""]
                found += [f"{where}: {name}" for name in names if name.partition(".")[0] not in LATE]
    assert found == []


def test_rooms_say_what_they_are() -> None:
    """The first lines of a room say what comes in, what goes out and what it may touch."""
    rooms = [room for room in PACKAGER.iterdir() if room.is_dir() and room.name != "__pycache__"]
    said = {room.name: ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8"))) or "" for room in rooms}
    assert said
    assert [name for name, text in said.items() if len(text.split()) < 20] == []


def test_others_import_nothing_of_the_packager() -> None:
    """Benchmarks and the client use what a user has: commands and files."""
    texts = {path: path.read_text("utf-8") for folder in ("benchmarks", "client") for path in (ROOT / folder).rglob("*.py")}
    assert texts
    assert [str(path) for path, text in texts.items() if "vllm_env." in text and _imports_it(text)] == []


def _imports_it(text: str) -> bool:
    modules = {node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    return any(module.partition(".")[0] == "vllm_env" for module in modules) or "from vllm_env." in text
