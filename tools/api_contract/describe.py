"""The contract of one vLLM as a record: what of it the adapter touches, as text, so that two can be compared."""

from __future__ import annotations

import ast
import functools
import re
from typing import TYPE_CHECKING, Any

from api_contract import needs
from api_contract.sources import Function, calls_of

if TYPE_CHECKING:
    from api_contract.adapter import Needs
    from api_contract.sources import Sources

Record = dict[str, Any]
_STATE = re.compile(r"\breq(uest)?_states?\b|\bstate\.queue$|[Cc]ollector")
"""What holds a request's collector, or is one."""


def describe(sources: Sources, wanted: Needs) -> Record:
    """Return the record: sections of names with what is said of each (JSON types only)."""
    return {
        "version": sources.version,
        "places": {name: _place(sources, name, places) for name, places in wanted.places.items()},
        "classes": {owner: text for owner in _owners(wanted) if (text := _class(sources, owner))},
        "members": {
            f"{owner}.{name}": text for owner in _owners(wanted) for name, text in _members(sources, owner, wanted).items()
        },
        "errors": {f"{m}.{n}": bases for m in needs.ERRORS for n, bases in _bases(sources, m).items()},
        "variables": {name: text for name, text in known_variables(sources).items() if name in wanted.variables},
        "finish_reasons": finish_reasons(sources),
        "put": put_calls(sources),
        "handler": callers(sources, "vllm.v1.engine.async_llm", "process_outputs"),
        "raised": raised(sources),
    }


def _place(sources: Sources, name: str, places: tuple[str, ...]) -> str:
    """Return the module in which a name is found, and the one that defines it if that is another."""
    for module in places:
        found = sources.find(module, name)
        if found is not None:
            return module if found[0] == module else f"{module} (from {found[0]})"
    return "nowhere"


def _owners(wanted: Needs) -> list[str]:
    return sorted({*wanted.classes, *needs.RECORDED})


def _class(sources: Sources, owner: str) -> str:
    lineage = sources.lineage(owner)
    return text_of(lineage[-1][1]) if lineage else ""


def _members(sources: Sources, owner: str, wanted: Needs) -> dict[str, str]:
    used = wanted.classes.get(owner, {})
    present = sources.members(owner)
    chosen = [
        name
        for name, node in present.items()
        if name in used or (owner in needs.RECORDED and not name.startswith("_") and not isinstance(node, Function))
    ]
    return {name: text_of(present[name]) for name in sorted(chosen)}


def text_of(node: ast.AST) -> str:
    """Return what a definition says, without its body: a signature, a type with its default, bases."""
    if isinstance(node, ast.ClassDef):
        decorators = [f"@{ast.unparse(d)}" for d in node.decorator_list]
        return " ".join([*decorators, f"({', '.join(ast.unparse(b) for b in node.bases)})"])
    if isinstance(node, Function):
        decorators = [f"@{ast.unparse(d)}" for d in node.decorator_list]
        kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return " ".join([*decorators, f"{kind} ({ast.unparse(node.args)}){returns}"])
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.annotation) + (f" = {ast.unparse(node.value)}" if node.value else "")
    return f"= {ast.unparse(node.value)}" if isinstance(node, ast.Assign) else "set in __init__"


def _bases(sources: Sources, module: str) -> dict[str, str]:
    tree = sources.module(module)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)] if tree else []
    return {node.name: ", ".join(ast.unparse(base) for base in node.bases) for node in classes}


def known_variables(sources: Sources) -> dict[str, str]:
    """Return vLLM's environment variables with their declared types and defaults."""
    found = sources.find("vllm.envs", "environment_variables")
    table = found[1].value if found and isinstance(found[1], ast.Assign | ast.AnnAssign) else None
    names = [key.value for key in table.keys if isinstance(key, ast.Constant)] if isinstance(table, ast.Dict) else []
    declared = ((name, sources.find("vllm.envs", str(name))) for name in names)
    return {str(name): text_of(found[1]) if found else "" for name, found in declared}


def finish_reasons(sources: Sources) -> list[str]:
    """Return what a completion's `finish_reason` may be."""
    found = sources.find("vllm.v1.engine", "FINISH_REASON_STRINGS")
    value = found[1].value if found and isinstance(found[1], ast.Assign) else None
    return [str(ast.literal_eval(item)) for item in value.elts] if isinstance(value, ast.Tuple) else []


def callers(sources: Sources, module: str, method: str) -> list[str]:
    """Return the functions of a module that call a method, whatever the object."""
    tree = sources.module(module)
    return sorted({f"{module}.{call.where}" for call in calls_of(tree, method)}) if tree else []


@functools.cache  # it reads many modules
def put_calls(sources: Sources) -> list[str]:
    """Return the functions that call `put` of a RequestOutputCollector, each with what it puts: `module.Class.method(argument)`.

    In a module that knows the class each call counts; elsewhere only the words tell, for nothing says the types.
    """
    knowing = set(sources.modules_with(".put", needs.COLLECTOR))
    found: set[str] = set()
    for module in sources.modules_with(".put"):
        tree = sources.module(module)
        calls = calls_of(tree, "put", "put_nowait") if tree else ()
        found |= {f"{module}.{c.where}({c.arguments})" for c in calls if module in knowing or _STATE.search(c.owner)}
    return sorted(found)


def raised(sources: Sources) -> dict[str, list[str]]:
    """Return the classes that each module for requests raises; a variable's name says nothing and is left out.

    What a module's own `__getattr__` raises is Python's, for names that it does not have.
    """
    found: dict[str, list[str]] = {}
    for module in needs.REFUSING:
        tree = sources.module(module)
        names: set[str] = set()
        body = [part for part in tree.body if getattr(part, "name", "") != "__getattr__"] if tree else []
        for node in (node for part in body for node in ast.walk(part)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                names.add(node.exc.func.id)
        if names:
            found[module] = sorted(names)
    return found
