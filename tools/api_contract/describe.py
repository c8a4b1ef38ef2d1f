"""Record the contract of one vLLM as text, for what the adapter uses of it, and compare two records."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from api_contract import needs
from api_contract.sources import Function

if TYPE_CHECKING:
    from api_contract.adapter import Needs
    from api_contract.sources import Sources

Record = dict[str, str]
"""Name -> its definition in the sources as text. ``version`` is vLLM's version."""


@dataclass(frozen=True)
class Difference:
    """Lines for new, removed and changed names; a line for a changed name has both texts."""

    new: list[str]
    gone: list[str]
    changed: list[str]


def describe(sources: Sources, wanted: Needs) -> Record:
    """Return the record: the places of names, the definitions of classes and members, and the existing errors."""
    record = {"version": sources.version}
    for name, places in wanted.places.items():
        record[f"place of {name}"] = _place(sources, name, places)
    for owner in {*wanted.classes, *needs.RECORDED}:
        lineage = sources.lineage(owner)
        if lineage:
            record[owner] = text_of(lineage[-1][1])
        for name, node in sources.members(owner).items():
            if name in wanted.classes.get(owner, {}) or _is_recorded(owner, name, node):
                record[f"{owner}.{name}"] = text_of(node)
    for module in needs.ERRORS:
        tree = sources.module(module)
        for node in tree.body if tree else ():
            if isinstance(node, ast.ClassDef):
                record[f"{module}.{node.name}"] = text_of(node)
    return dict(sorted(record.items()))


def compare(before: Record, after: Record) -> Difference:
    """Return the difference between two records, without their versions."""
    both = sorted(before.keys() & after.keys() - {"version"})
    return Difference(
        new=[f"{name}: {after[name]}" for name in sorted(after.keys() - before.keys())],
        gone=[f"{name}: {before[name]}" for name in sorted(before.keys() - after.keys())],
        changed=[
            f"{name}: {before[name]}  ->  {after[name]}"
            for name in both
            if before[name] != after[name]
        ],
    )


def _place(sources: Sources, name: str, places: tuple[str, ...]) -> str:
    """Return the module where a name is found, and the module that defines it if that is another one."""
    for module in places:
        found = sources.find(module, name)
        if found is not None:
            return module if found[0] == module else f"{module} (from {found[0]})"
    return "nowhere"


def _is_recorded(owner: str, name: str, node: ast.AST) -> bool:
    return owner in needs.RECORDED and not name.startswith("_") and not isinstance(node, Function)


def text_of(node: ast.AST) -> str:
    """Return a definition as text without its body: a signature, a type with its default, or bases."""
    if isinstance(node, ast.ClassDef):
        decorators = [f"@{ast.unparse(d)}" for d in node.decorator_list]
        return " ".join([*decorators, f"({', '.join(ast.unparse(b) for b in node.bases)})"])
    if isinstance(node, Function):
        decorators = [f"@{ast.unparse(d)}" for d in node.decorator_list]
        kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return " ".join([*decorators, f"{kind} ({ast.unparse(node.args)}){returns}"])
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.annotation) + (
            f" = {ast.unparse(node.value)}" if node.value else ""
        )
    return f"= {ast.unparse(node.value)}" if isinstance(node, ast.Assign) else "set in __init__"
