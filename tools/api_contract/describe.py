"""Record what the adapter uses of one vLLM as text, and compare two records."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from api_contract import needs
from api_contract.sources import Function

if TYPE_CHECKING:
    from api_contract.adapter import Needs
    from api_contract.sources import Sources

# Name -> its definition in the sources as text. The entry `version` is vLLM's version.
Record = dict[str, str]


@dataclass(frozen=True)
class Difference:
    """Lines for new, removed and changed names, as ``name: definition``."""

    new: list[str]
    gone: list[str]
    changed: list[str]


def describe(sources: Sources, wanted: Needs) -> Record:
    """Return the record of one vLLM.

    Args:
        sources: the sources of the vLLM.
        wanted: the adapter's needs.
    """
    record = {"version": sources.version}
    # 1) The modules of the names
    for name, places in wanted.places.items():
        record[f"place of {name}"] = _place(sources, name, places)
    # 2) The definitions of classes, and of their members that the adapter or a client uses
    for owner in {*wanted.classes, *needs.RECORDED}:
        if lineage := sources.lineage(owner):
            _, definition = lineage[-1]
            record[owner] = text_of(definition)
        for name, node in sources.members(owner).items():
            if name in wanted.classes.get(owner, ()) or _is_recorded(owner, name, node):
                record[f"{owner}.{name}"] = text_of(node)
    # 3) All errors: a new one may need an answer of its own
    for module in needs.ERRORS:
        tree = sources.module(module)
        for node in tree.body if tree else ():
            if isinstance(node, ast.ClassDef):
                record[f"{module}.{node.name}"] = text_of(node)
    # Sorted, so that a new record of the same vLLM is the same file.
    return dict(sorted(record.items()))


def compare(before: Record, after: Record) -> Difference:
    """Return the difference between two records, without their versions."""
    both = before.keys() & after.keys() - {"version"}
    changed = sorted(name for name in both if before[name] != after[name])
    return Difference(
        new=[f"{name}: {after[name]}" for name in sorted(after.keys() - before.keys())],
        gone=[f"{name}: {before[name]}" for name in sorted(before.keys() - after.keys())],
        changed=[f"{name}: {before[name]}  ->  {after[name]}" for name in changed],
    )


def _place(sources: Sources, name: str, places: tuple[str, ...]) -> str:
    """Return the module in which a name is found, and the module that defines it if it differs."""
    for module in places:
        if found := sources.find(module, name):
            defining, _ = found
            return module if defining == module else f"{module} (from {defining})"
    return "nowhere"


def _is_recorded(owner: str, name: str, node: ast.AST) -> bool:
    # Methods of these classes are vLLM's own business, unless the adapter calls them.
    return owner in needs.RECORDED and not name.startswith("_") and not isinstance(node, Function)


def text_of(node: ast.AST) -> str:
    """Return a definition without its body: bases, a signature, or a type with its default.

    If this text is the same in two versions of vLLM, callers need no change.
    """
    decorators = [f"@{ast.unparse(item)} " for item in getattr(node, "decorator_list", [])]
    if isinstance(node, ast.ClassDef):
        return f"{''.join(decorators)}({', '.join(map(ast.unparse, node.bases))})"
    if isinstance(node, Function):
        kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{''.join(decorators)}{kind} ({ast.unparse(node.args)}){returns}"
    # A field, as in a dataclass.
    if isinstance(node, ast.AnnAssign):
        default = f" = {ast.unparse(node.value)}" if node.value else ""
        return f"{ast.unparse(node.annotation)}{default}"
    # A class attribute, such as an enum's member.
    if isinstance(node, ast.Assign):
        return f"= {ast.unparse(node.value)}"
    # An attribute that ``__init__`` assigns has no declaration to show.
    return "set in __init__"
