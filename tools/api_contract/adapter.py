"""The adapter's needs of vLLM: those that its own sources state, read with `ast`, and those that `needs` adds."""

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
# The adapter's protocols name vLLM's class, and the first version that has a member, in their docstrings.
_CLASS = re.compile(r"``(vllm(?:\.\w+)+)``")
_SINCE = re.compile(r"\bsince (0\.\d+)")
_VARIABLE = re.compile(r"VLLM_[A-Z0-9_]+")


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
    places, required = _places(folder)
    classes: dict[str, dict[str, Member]] = defaultdict(dict)
    for table in (_declared(folder / "triton_vllm" / "base" / "protocols.py"), needs.STATED):
        for owner, members in table.items():
            classes[owner] |= members
    used = {text for _, text in texts(folder) if _VARIABLE.fullmatch(text)} - places.keys()
    since = {name: since for name, since in needs.SINCE.items() if name in places} | dict.fromkeys(
        required, needs.OLDEST
    )
    variables = {name: needs.VARIABLES.get(name, needs.OLDEST) for name in sorted(used)}
    checked = _literal(folder / "triton_vllm" / "request" / "fit.py", "TOKEN_IDS")
    return Needs(places, since, classes, variables, needs.CHECKED_BY_VLLM | set(checked))


def _places(folder: Path) -> tuple[dict[str, tuple[str, ...]], set[str]]:
    """Return name -> modules, and the names that every vLLM must have."""
    parts = folder / "triton_vllm" / "vllm_api" / "parts.py"
    required = _literal(parts, "PLACES")
    return {**required, **_literal(parts, "OPTIONAL_PLACES")}, set(required)


def _literal(path: Path, name: str) -> Any:
    """Return the value of a module's constant, which must be a literal."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and name in targets(node):
            return ast.literal_eval(node.value)
    raise LookupError(f"{path} has no {name}")


def _declared(protocols: Path) -> dict[str, dict[str, Member]]:
    """Return the members that the protocols of vLLM's classes declare; mypy checks the adapter against them."""
    found: dict[str, dict[str, Member]] = {}
    for node in ast.parse(protocols.read_text(encoding="utf-8")).body:
        said = (ast.get_docstring(node) or "") if isinstance(node, ast.ClassDef) else ""
        name = _CLASS.match(said)
        if name and isinstance(node, ast.ClassDef):
            since = _SINCE.search(said)
            members: dict[str, Member] = {}
            for member in node.body:
                if isinstance(member, Function):
                    members[member.name] = _member(member, since)
                elif isinstance(member, ast.AnnAssign):
                    attribute = Member(since=since[1] if since else needs.OLDEST)
                    members |= dict.fromkeys(targets(member), attribute)
            found[name[1]] = members
    return found


def _member(node: Function, of_class: re.Match[str] | None) -> Member:
    said = _SINCE.search(ast.get_docstring(node) or "") or of_class
    since = said[1] if said else needs.OLDEST
    parameters = tuple(a.arg for a in (*node.args.args, *node.args.kwonlyargs) if a.arg != "self")
    return Member(parameters, awaited=is_awaited(node), since=since)


def is_awaited(node: Function) -> bool:
    """Return whether the caller must await the result of a function."""
    returns = ast.unparse(node.returns) if node.returns else ""
    generates = any(
        isinstance(inner, ast.Yield) for inner in ast.walk(node)
    )  # an asynchronous generator is called without await
    return (isinstance(node, ast.AsyncFunctionDef) and not generates) or returns.startswith(
        ("Awaitable[", "Coroutine[")
    )


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
