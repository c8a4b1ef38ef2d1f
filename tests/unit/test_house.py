"""The structure's own rules beside import-linter's layers: sizes, parameters, late imports, what rooms say of themselves."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PACKAGER = ROOT / "env" / "vllm_env"
PARTS = ("env/vllm_env/**/*.py", "client/**/*.py", "model_repository/vllm/1/**/*.py", "tools/**/*.py")
SOURCES = sorted(file for part in PARTS for file in ROOT.glob(part))
LONGEST, MOST_PARAMETERS, MOST_ENTRIES, MOST_LINES = 40, 6, 15, 10_548
AS_BEFORE = 7_898  # lines of the packager before it had a workspace, a network policy and the standard lock (fc2eb29)
JOINTS = 17  # lines of these modules that call `adopt` and the layout in parts
# what was asked for after those: missing libraries, clashing files, what vLLM imports later,
# Debian's interpreters, machines without a model hub, what a dry run says of costs, models of the official backend,
# environments in parts, interrupts that wait, folders that are edited meanwhile
SINCE = {
    *("prefix/machine_libraries.py", "prefix/needed_libraries.py", "prefix/outside_libraries.py", "prefix/file_owners.py"),
    *("verify/compiler_check.py", "verify/driver_standin.py", "verify/lazy_imports.py", "verify/lazy_probe.py"),
    *("interpreter/debian.py", "interpreter/debian_site.py", "base/machine.py", "base/interrupts.py"),
    *("publish/check_model.py", "publish/without_hub.py", "cli/forecast.py"),
    *("publish/adopt.py", "publish/changes.py", "publish/model_config.py", "cli/adopt.py"),
    *("archive/parts.py", "archive/parts_finder.py", "archive/parts_unpack.py", "verify/parts.py", "serve/unpacked.py"),
}
TABLES = {"build_parser"}  # the table of options
LATE = {
    "torch",
    "transformers",
    "tokenizers",
    "vllm",
    "PIL",
    "prometheus_client",
    "uvloop",
    "cv2",
}  # take seconds, or are in the environment only
LATE |= {"_locale", "_thread", "select", "gc", "_vllm_env_unpack"}  # the start-up hook imports what is loaded already
LATE |= {"atexit", "multiprocessing"}  # and in a child that the stub has spawned what that needs next
LATE |= {"triton_vllm", "triton_stream"}  # need one of the above, or tritonclient, which may be missing
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[str, Function]]:
    """Yield every function of the product with its place."""
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, Function):
                yield f"{file.relative_to(ROOT)}:{node.lineno} {node.name}", node


def test_a_function_fits_on_a_screen() -> None:
    """At most 40 lines from its name to its end, but for the table of options."""
    lengths = {where: (node.end_lineno or 0) - node.lineno + 1 for where, node in functions() if node.name not in TABLES}
    assert {where: length for where, length in lengths.items() if length > LONGEST} == {}


def test_a_function_takes_few_parameters() -> None:
    """At most six beside the object itself."""
    counts = {}
    for where, node in functions():
        arguments = node.args
        named = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        counts[where] = len([name for name in named if name not in ("self", "cls")])
    assert {where: count for where, count in counts.items() if count > MOST_PARAMETERS} == {}


def test_imports_stand_at_the_top() -> None:
    """Inside a function only what is heavy or optional is imported."""
    found = []
    for where, node in functions():
        for inner in ast.walk(node):
            names = [a.name for a in inner.names] if isinstance(inner, ast.Import) else []
            names += [inner.module or ""] if isinstance(inner, ast.ImportFrom) else []
            found += [f"{where}: {name}" for name in names if name.partition(".")[0] not in LATE]
    assert found == []


def test_rooms_say_what_they_are() -> None:
    """At most 15 entries at the top, each a room whose first lines tell what comes in, goes out and may be touched."""
    entries = [p for p in PACKAGER.iterdir() if p.name != "__pycache__"]
    assert len(entries) <= MOST_ENTRIES
    for room in (p for p in entries if p.is_dir()):
        said = ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8"))) or ""
        assert len(said.split()) >= 20, f"{room.name}/__init__.py tells too little"


def test_the_packager_stays_small() -> None:
    """As a whole, and without the modules of later features no larger than before the rooms: their price is what went."""
    lines = {file.relative_to(PACKAGER).as_posix(): len(file.read_text("utf-8").splitlines()) for file in PACKAGER.rglob("*.py")}
    assert lines.keys() >= SINCE
    assert sum(lines.values()) <= MOST_LINES
    assert sum(count for name, count in lines.items() if name not in SINCE) <= AS_BEFORE + JOINTS


@pytest.mark.parametrize("folder", ["benchmarks", "client"])
def test_others_import_nothing_of_the_packager(folder: str) -> None:
    """Benchmarks and the client use what a user has: commands and files."""
    texts = {p: p.read_text("utf-8") for p in (ROOT / folder).rglob("*.py")}
    assert [str(p) for p, text in texts.items() if "vllm_env." in text and "import" in text and _imports_it(text)] == []


def _imports_it(text: str) -> bool:
    modules = {node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    return any(module.partition(".")[0] == "vllm_env" for module in modules) or "from vllm_env." in text
