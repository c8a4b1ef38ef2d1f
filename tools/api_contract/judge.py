"""Find the adapter's needs that a vLLM does not meet."""

from __future__ import annotations

import ast
import functools
import re
from typing import TYPE_CHECKING

from api_contract import needs
from api_contract.adapter import is_awaited
from api_contract.sources import Function, calls_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from api_contract.adapter import Needs
    from api_contract.needs import Member
    from api_contract.sources import Sources

_STATE = re.compile(r"\breq(uest)?_states?\b|\bstate\.queue$|[Cc]ollector")
"""Matches expressions that name a request's collector, or an object that holds it."""


def problems(sources: Sources, wanted: Needs, version: str) -> list[str]:
    """Return a line for each need that the vLLM does not meet.

    Args:
        sources: the sources of the vLLM.
        wanted: the adapter's needs.
        version: vLLM's version; one without a number counts as the newest.
    """
    if not _reached(version, needs.OLDEST):
        return [f"vLLM {version}: older than {needs.OLDEST}, the oldest that the adapter takes"]
    return [
        *_names(sources, wanted, version),
        *_classes(sources, wanted, version),
        *_constructors(sources, version),
        *_answers(sources, version),
        *_refusals(sources, wanted),
        *_surroundings(sources, wanted, version),
    ]


def order(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, by which versions are compared."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = tuple(int(part) for part in release[0].split(".")) if release else (9999,)
    # 0.1.dev…: built from a clone without tags, so probably new.
    return (9999,) if "dev" in version and numbers < (0, 11) else numbers


def _reached(version: str, since: str) -> bool:
    return order(version) >= order(since)


def _names(sources: Sources, wanted: Needs, version: str) -> Iterator[str]:
    for name, places in wanted.places.items():
        required = name in wanted.since and _reached(version, wanted.since[name])
        if required and not any(sources.find(place, name) for place in places):
            yield f"{name} in {' or '.join(places)}: gone"
    for module, names in needs.MODULES.items():
        for name in names:
            if sources.find(module, name) is None:
                yield f"{module}.{name}: gone"


def _classes(sources: Sources, wanted: Needs, version: str) -> Iterator[str]:
    for owner, members in wanted.classes.items():
        present = sources.members(owner)
        for name, member in members.items():
            if not _reached(version, member.since):
                continue
            if name not in present:
                yield f"{owner}.{name}: gone"
            elif member.parameters is not None:
                yield from (f"{owner}.{name}{text}" for text in _method(present[name], member))
            elif (
                member.default is not None
                and (default := default_of(present[name])) != member.default
            ):
                yield f"{owner}.{name}: its default is {default}, and the adapter counts on {member.default}"


def _method(node: ast.AST, member: Member) -> Iterator[str]:
    if not isinstance(node, Function):
        yield ": is no method any more"
        return
    arguments = node.args
    named = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    passed = member.parameters or ()
    if arguments.kwarg is None:
        yield from (f"({name}=): gone" for name in passed if name not in named)
    placed = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    required = placed[: len(placed) - len(arguments.defaults)]
    required += [
        a.arg
        for a, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if value is None
    ]
    yield from (
        f"({name}=): required now" for name in required if name not in {*passed, "self", "cls"}
    )
    if member.awaited is not None and is_awaited(node) != member.awaited:
        yield ": is async now" if is_awaited(node) else ": is no longer async"


def default_of(node: ast.AST) -> str | None:
    """Return a field's default as written in the source; None if it has none."""
    value = node.value if isinstance(node, ast.AnnAssign | ast.Assign) else None
    if isinstance(value, ast.Call):
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        value = given.get("default", value)
    return ast.unparse(value) if value is not None else None


def _constructors(sources: Sources, version: str) -> Iterator[str]:
    for owner, passed in needs.MADE.items():
        if not _reached(version, needs.SINCE.get(owner.rpartition(".")[2], needs.OLDEST)):
            continue
        nodes = sources.members(owner)
        fields = {
            name: node
            for name, node in nodes.items()
            if isinstance(node, ast.AnnAssign) and not _is_constant(node)
        }
        yield from (
            f"{owner}({name}=): required now"
            for name, n in fields.items()
            if n.value is None and name not in passed
        )
        if owner in needs.POSITIONAL and tuple(fields)[: len(passed)] != passed:
            yield f"{owner}: its first fields are no longer {', '.join(passed)}"


def _is_constant(node: ast.AnnAssign) -> bool:
    return ast.unparse(node.annotation).startswith("ClassVar")


def _answers(sources: Sources, version: str) -> Iterator[str]:
    reasons = _finish_reasons(sources)
    yield from (
        f"finish reason {name!r}: the adapter does not know it"
        for name in reasons
        if name not in needs.FINISH_REASONS
    )
    if "error" not in reasons and _reached(version, "0.14"):
        yield "finish reason 'error': gone, and a failed request would pass for an answer"
    add_request = sources.members("vllm.v1.engine.async_llm.AsyncLLM").get("add_request")
    returns = (
        ast.unparse(add_request.returns)
        if isinstance(add_request, Function) and add_request.returns
        else "nothing"
    )
    if needs.COLLECTOR not in returns:
        yield f"vllm.v1.engine.async_llm.AsyncLLM.add_request: returns {returns}, and no {needs.COLLECTOR}"
    putting = _put_calls(sources)
    yield from (
        f"{needs.COLLECTOR}.put: called in {call} now"
        for call in putting
        if call not in needs.PUT_BY
    )
    yield from (
        f"{needs.COLLECTOR}.put: not called in {call} any more"
        for call in needs.PUT_ALWAYS
        if call not in putting
    )
    handling = _callers(sources, needs.HANDLER.split(".AsyncLLM")[0], "process_outputs")
    if handling != [needs.HANDLER]:
        yield f"OutputProcessor.process_outputs: called by {', '.join(handling) or 'nobody'}, and not by {needs.HANDLER} alone"


def _finish_reasons(sources: Sources) -> list[str]:
    """Return the possible values of a completion's ``finish_reason``."""
    found = sources.find("vllm.v1.engine", "FINISH_REASON_STRINGS")
    value = found[1].value if found and isinstance(found[1], ast.Assign) else None
    return (
        [str(ast.literal_eval(item)) for item in value.elts] if isinstance(value, ast.Tuple) else []
    )


@functools.cache  # reads many modules
def _put_calls(sources: Sources) -> list[str]:
    """Return the calls of ``RequestOutputCollector.put``, each with its argument: ``module.Class.method(argument)``.

    In a module that names the class, each call of ``put`` counts. Elsewhere, only the object's name tells (``_STATE``), because the
    sources do not state its type.
    """
    knowing = set(sources.modules_with(".put", needs.COLLECTOR))
    found: set[str] = set()
    for module in sources.modules_with(".put"):
        tree = sources.module(module)
        calls = calls_of(tree, "put", "put_nowait") if tree else ()
        found |= {
            f"{module}.{c.where}({c.arguments})"
            for c in calls
            if module in knowing or _STATE.search(c.owner)
        }
    return sorted(found)


def _callers(sources: Sources, module: str, method: str) -> list[str]:
    """Return the functions of a module that call a method of this name, on any object."""
    tree = sources.module(module)
    return sorted({f"{module}.{call.where}" for call in calls_of(tree, method)}) if tree else []


def _refusals(sources: Sources, wanted: Needs) -> Iterator[str]:
    for name in sources.members("vllm.sampling_params.SamplingParams"):
        if (
            name.endswith("token_ids")
            and not name.startswith(("_", "all_", "bad_words_"))
            and name not in wanted.token_ids
        ):
            yield f"vllm.sampling_params.SamplingParams.{name}: token ids that nobody checks"
    for module, names in _raised(sources).items():
        for name in names:
            if not sources.ancestors(module, name) & (needs.REFUSALS | needs.FAULTS):
                yield f"{module}: raises {name}, which the adapter takes for no refusal"


def _raised(sources: Sources) -> dict[str, list[str]]:
    """Return the classes that each module for requests raises, without re-raised variables: their names say nothing.

    A module's own ``__getattr__`` is left out. It raises Python's error for a missing name.
    """
    found: dict[str, list[str]] = {}
    for module in needs.REFUSING:
        tree = sources.module(module)
        names: set[str] = set()
        body = (
            [part for part in tree.body if getattr(part, "name", "") != "__getattr__"]
            if tree
            else []
        )
        for node in (node for part in body for node in ast.walk(part)):
            if (
                isinstance(node, ast.Raise)
                and isinstance(node.exc, ast.Call)
                and isinstance(node.exc.func, ast.Name)
            ):
                names.add(node.exc.func.id)
        if names:
            found[module] = sorted(names)
    return found


def _surroundings(sources: Sources, wanted: Needs, version: str) -> Iterator[str]:
    found = sources.find("vllm.envs", "environment_variables")
    table = found[1].value if found and isinstance(found[1], ast.Assign | ast.AnnAssign) else None
    known = (
        [key.value for key in table.keys if isinstance(key, ast.Constant)]
        if isinstance(table, ast.Dict)
        else []
    )
    for name, since in wanted.variables.items():
        if _reached(version, since) and name not in known:
            yield f"variable {name}: not known any more"
    for module, (since, statements) in needs.STATEMENTS.items():
        tree = sources.module(module)
        written = ast.unparse(tree) if tree else ""
        if _reached(version, since):
            yield from (
                f"{module}: no {text!r} any more" for text in statements if text not in written
            )
