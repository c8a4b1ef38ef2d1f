"""Find the adapter's needs that a vLLM does not meet."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from api_contract import needs
from api_contract.adapter import is_awaited
from api_contract.sources import Function
from api_contract.statements import STATEMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from api_contract.adapter import Needs
    from api_contract.sources import Sources


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
        *_finish_reasons(sources, version),
        *_refusals(sources, wanted),
        *_surroundings(sources, wanted, version),
    ]


def order(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, by which versions are compared."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = tuple(int(part) for part in release[0].split(".")) if release else (9999,)
    # A build from a clone without tags is called 0.1.dev…, and is probably new.
    return (9999,) if "dev" in version and numbers < (0, 11) else numbers


def _reached(version: str, since: str) -> bool:
    """Return whether a version is ``since`` or newer."""
    return order(version) >= order(since)


def _names(sources: Sources, wanted: Needs, version: str) -> Iterator[str]:
    """Yield a line for each name that this version must have and does not."""
    # 1) Names that one of several modules defines
    for name, modules in wanted.places.items():
        # A name without a first version is optional in every version.
        required = name in wanted.since and _reached(version, wanted.since[name])
        if required and not any(sources.find(module, name) for module in modules):
            yield f"{name} in {' or '.join(modules)}: gone"
    # 2) Names of one module
    for module, names in needs.MODULES.items():
        for name in names:
            required = _reached(version, needs.SINCE.get(name, needs.OLDEST))
            if required and sources.find(module, name) is None:
                yield f"{module}.{name}: gone"


def _classes(sources: Sources, wanted: Needs, version: str) -> Iterator[str]:
    """Yield a line for each member of vLLM's classes that is gone or has changed."""
    for owner, members in wanted.classes.items():
        present = sources.members(owner)
        for name, member in members.items():
            if not _reached(version, member.since):
                continue
            if name not in present:
                yield f"{owner}.{name}: gone"
            elif member.parameters is not None:
                faults = _method(present[name], member.parameters, awaited=member.awaited)
                yield from (f"{owner}.{name}{fault}" for fault in faults)
            elif member.default is not None:
                default = default_of(present[name])
                if default != member.default:
                    yield (
                        f"{owner}.{name}: its default is {default}, "
                        f"and the adapter counts on {member.default}"
                    )


def _method(node: ast.AST, passed: tuple[str, ...], *, awaited: bool | None) -> Iterator[str]:
    """Yield what is wrong with a method, as the end of a line that starts with its name.

    Args:
        node: defines the member, which may not be a method any more.
        passed: the names of the arguments that the adapter passes.
        awaited: whether the adapter awaits it; None if both kinds work.
    """
    if not isinstance(node, Function):
        yield ": is no method any more"
        return
    arguments = node.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    keywords = [a.arg for a in arguments.kwonlyargs]
    # 1) The adapter's arguments have parameters; **kwargs takes any argument
    if arguments.kwarg is None:
        yield from (f"({name}=): gone" for name in passed if name not in positional + keywords)
    # 2) The others have defaults. `ast` lists only the defaults that exist, which are those of the
    # last positional parameters. For a keyword without a default it has None.
    required = positional[: len(positional) - len(arguments.defaults)]
    defaults = zip(keywords, arguments.kw_defaults, strict=True)
    required += [name for name, value in defaults if value is None]
    missing = [name for name in required if name not in (*passed, "self", "cls")]
    yield from (f"({name}=): required now" for name in missing)
    # 3) It must be awaited, or not, as the adapter does
    if awaited is not None and awaited != is_awaited(node):
        yield ": is no longer async" if awaited else ": is async now"


def default_of(node: ast.AST) -> str | None:
    """Return a field's default as written in the source; None if the field has none."""
    value = node.value if isinstance(node, ast.AnnAssign | ast.Assign) else None
    # Written as field(default=...), of dataclasses or msgspec.
    if isinstance(value, ast.Call):
        arguments = {keyword.arg: keyword.value for keyword in value.keywords}
        value = arguments.get("default", value)
    return ast.unparse(value) if value else None


def _constructors(sources: Sources, version: str) -> Iterator[str]:
    """Yield a line for each class that the adapter can no longer create with its arguments."""
    for owner, passed in needs.MADE.items():
        name = owner.rpartition(".")[2]
        if not _reached(version, needs.SINCE.get(name, needs.OLDEST)):
            continue
        # The constructors of these classes have a parameter for each field, in the same order.
        fields: list[str] = []
        for field, node in sources.members(owner).items():
            # Neither a method nor a ClassVar is a field.
            if not isinstance(node, ast.AnnAssign):
                continue
            if ast.unparse(node.annotation).startswith("ClassVar"):
                continue
            fields.append(field)
            if node.value is None and field not in passed:
                yield f"{owner}({field}=): required now"
        if owner in needs.POSITIONAL and tuple(fields[: len(passed)]) != passed:
            yield f"{owner}: its first fields are no longer {', '.join(passed)}"


def _finish_reasons(sources: Sources, version: str) -> Iterator[str]:
    """Yield a line for each finish reason that is new, and one if "error" is missing."""
    value = sources.value("vllm.v1.engine", "FINISH_REASON_STRINGS")
    reasons = ast.literal_eval(value) if isinstance(value, ast.Tuple) else ()
    for name in reasons:
        if name not in needs.FINISH_REASONS:
            yield f"finish reason {name!r}: the adapter does not know it"
    # vLLM has it since 0.14.
    if "error" not in reasons and _reached(version, "0.14"):
        yield "finish reason 'error': gone, and a failed request would pass for an answer"


def _refusals(sources: Sources, wanted: Needs) -> Iterator[str]:
    """Yield a line for each kind of wrong request that the adapter would not refuse.

    These are token ids that nothing checks, and vLLM's errors that do not count as refusals.
    """
    for name in sources.members("vllm.sampling_params.SamplingParams"):
        # vLLM derives these from other parameters.
        if name.startswith(("_", "all_", "bad_words_")):
            continue
        # Such ids index tables that requests share, so they must be in the vocabulary.
        if name.endswith("token_ids") and name not in wanted.token_ids:
            yield f"vllm.sampling_params.SamplingParams.{name}: token ids that nobody checks"
    known = needs.REFUSALS | needs.FAULTS
    for module, names in _raised(sources).items():
        for name in names:
            # An error that is derived from a known one counts as that one.
            if not sources.ancestors(module, name) & known:
                yield f"{module}: raises {name}, which the adapter takes for no refusal"


def _raised(sources: Sources) -> dict[str, list[str]]:
    """Return the names of the errors that each module of ``needs.REFUSING`` raises."""
    found: dict[str, list[str]] = {}
    for module in needs.REFUSING:
        tree = sources.module(module)
        names: set[str] = set()
        for item in tree.body if tree else ():
            # A module's __getattr__ raises Python's own error for a missing name.
            if getattr(item, "name", "") == "__getattr__":
                continue
            for node in ast.walk(item):
                # `raise error` raises a variable again. Its name does not tell its class.
                raised = node.exc if isinstance(node, ast.Raise) else None
                if isinstance(raised, ast.Call) and isinstance(raised.func, ast.Name):
                    names.add(raised.func.id)
        found[module] = sorted(names)
    return found


def _surroundings(sources: Sources, wanted: Needs, version: str) -> Iterator[str]:
    """Yield a line for each environment variable and each statement that vLLM no longer has."""
    table = sources.value("vllm.envs", "environment_variables")
    keys = table.keys if isinstance(table, ast.Dict) else []
    known = [key.value for key in keys if isinstance(key, ast.Constant)]
    for name, since in wanted.variables.items():
        if _reached(version, since) and name not in known:
            yield f"variable {name}: not known any more"
    for module, (since, statements) in STATEMENTS.items():
        if not _reached(version, since):
            continue
        tree = sources.module(module)
        # Unparsed, so that line breaks and quotes do not matter.
        written = ast.unparse(tree) if tree else ""
        for statement in statements:
            if statement not in written:
                yield f"{module}: no {statement!r} any more"
