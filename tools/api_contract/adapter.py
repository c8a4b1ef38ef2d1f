"""Collect the adapter's needs: its own sources state some, and ``needs`` adds the others."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from api_contract import needs
from api_contract.needs import Member
from api_contract.sources import Function, targets

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VERSION_FOLDER = Path(__file__).resolve().parents[2] / "model_repository" / "vllm" / "1"
# The docstrings of the adapter's protocols name vLLM's class, between single or double backticks,
# and the first version that has a member.
_CLASS = re.compile(r"`+(vllm(?:\.\w+)+)`")
_SINCE = re.compile(r"\bsince (0\.\d+)")
# VLLM_ENV_ is ours.
_VARIABLE = re.compile(r"VLLM_(?!ENV_)[A-Z0-9_]+")


@dataclass(frozen=True)
class Needs:
    """All needs of the adapter.

    Attributes:
        places: name -> the modules that may define it.
        since: name -> the first version that must have it.
        classes: class -> the members of it that are used.
        variables: environment variable -> the first version that must read it.
        token_ids: the sampling parameters whose token ids are checked, here or by vLLM.
    """

    places: Mapping[str, tuple[str, ...]]
    since: Mapping[str, str]
    classes: Mapping[str, Mapping[str, Member]]
    variables: Mapping[str, str]
    token_ids: frozenset[str]


def read(folder: Path = VERSION_FOLDER) -> Needs:
    """Return the adapter's needs, read from a version folder of the model."""
    package = folder / "triton_vllm"
    # 1) Names and their modules
    names = package / "vllm_api" / "names.py"
    required = _literal(names, "PLACES")
    places = required | _literal(names, "OPTIONAL_PLACES")
    places |= _literal(package / "vllm_api" / "openai.py", "SERVER_PLACES")
    since = {**needs.SINCE, **dict.fromkeys(required, needs.OLDEST)}
    # 2) Classes and their members; what `needs` states of a member comes last and counts
    classes: dict[str, dict[str, Member]] = defaultdict(dict)
    for table in (_declared(package / "base" / "protocols.py"), needs.STATED):
        for owner, members in table.items():
            classes[owner] |= members
    # 3) Environment variables; some are imported from vllm.envs, and judged as names
    variables: dict[str, str] = {}
    for _, text in texts(folder):
        if _VARIABLE.fullmatch(text) and text not in places:
            variables[text] = needs.VARIABLES.get(text, needs.OLDEST)
    # 4) Parameters with token ids
    checked = _literal(package / "base" / "limits.py", "TOKEN_IDS")
    return Needs(places, since, classes, variables, needs.CHECKED_BY_VLLM.union(checked))


def _literal(path: Path, name: str) -> Any:
    """Return the value of a module's constant, which must be a literal."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and name in targets(node):
            return ast.literal_eval(node.value)
    raise LookupError(f"{path} has no {name}")


def _declared(protocols: Path) -> dict[str, dict[str, Member]]:
    """Return the members that the protocols of vLLM's classes declare."""
    # mypy checks the adapter against the protocols, so no use is missing here.
    found: dict[str, dict[str, Member]] = {}
    for node in ast.parse(protocols.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        docstring = ast.get_docstring(node) or ""
        # Other protocols, such as those for Triton's objects, do not start with a vLLM class.
        if name := _CLASS.match(docstring):
            since = _since(docstring, needs.OLDEST)
            members: dict[str, Member] = {}
            for item in node.body:
                # A property is read like an attribute, so it has no parameters to compare. What is
                # no function and has no annotation, such as a docstring, declares no member.
                if isinstance(item, Function) and _is_property(item):
                    members[item.name] = Member(since=_since(ast.get_docstring(item), since))
                elif isinstance(item, Function):
                    members[item.name] = _member(item, since)
                elif isinstance(item, ast.AnnAssign):
                    members |= dict.fromkeys(targets(item), Member(since=since))
            found[name[1]] = members
    return found


def _since(docstring: str | None, otherwise: str) -> str:
    """Return the version that a docstring names as the first one, or ``otherwise``."""
    found = _SINCE.search(docstring or "")
    return found[1] if found else otherwise


def _member(node: Function, class_since: str) -> Member:
    """Return the use of a method that a protocol declares: all its parameters are passed."""
    since = _since(ast.get_docstring(node), class_since)
    arguments = (*node.args.args, *node.args.kwonlyargs)
    parameters = tuple(argument.arg for argument in arguments if argument.arg != "self")
    return Member(parameters, awaited=is_awaited(node), since=since)


def _is_property(node: Function) -> bool:
    return any(ast.unparse(item) == "property" for item in node.decorator_list)


def is_awaited(node: Function) -> bool:
    """Return whether the caller must await the result of a function.

    A plain function counts, too, if its return type is an awaitable.
    """
    if isinstance(node, ast.AsyncFunctionDef):
        # An asynchronous generator is called without await.
        return not any(isinstance(inner, ast.Yield) for inner in ast.walk(node))
    returns = ast.unparse(node.returns) if node.returns else ""
    return returns.startswith(("Awaitable[", "Coroutine["))


def trees(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    """Yield the adapter's modules with their paths."""
    for path in sorted((folder / "triton_vllm").rglob("*.py")):
        yield path.relative_to(folder).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the strings in the adapter's sources, each with the path of its module."""
    for where, tree in trees(folder):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield where, node.value
