"""What the adapter uses of vLLM and `tools/api_contract/needs.py` does not list."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from api_contract import adapter, needs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MODULE = re.compile(r"vllm(?:\.\w+)+")
# names given to getattr() or hasattr() that are not vLLM's
OTHERS = frozenset(
    {
        "_grammar_from_parser",
        "_make",
        "always_adjust_request",
        "enable_log_requests",
        "errors",
        "id",
        "parse",
        "parse_delta",
        "set_prompt_token_ids",
        "uncancel",
        "launch_core_engines",
        "ndim",
        "num_labels",
        "trace",
        "timeout",
        "baseFilename",
        "__version__",
        # FastAPI's and pydantic's
        "annotation",
        "body_field",
        "choices",
        "error_count",
        "field_info",
        "model_fields",
        "path",
        "routes",
    }
)


def unlisted(found: adapter.Needs, folder: Path = adapter.VERSION_FOLDER) -> list[str]:
    """Return what the adapter uses of vLLM and `needs` does not list: it would go unnoticed where a vLLM lacks it."""
    missing = [f"needs.SINCE: {name}" for name in found.places if name not in found.since]
    modules = {place for places in found.places.values() for place in places} | needs.MODULES.keys()
    missing += [
        f"{where}: module {text}" for where, text in adapter.texts(folder) if _MODULE.fullmatch(text) and text not in modules
    ]
    known = {name for members in found.classes.values() for name in members} | OTHERS | {"environment_variables"}
    for where, tree in adapter.trees(folder):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                missing += [f"{where}: {text}" for text in _chain(node, found)]
            elif isinstance(node, ast.Call):
                missing += [f"{where}: {text}" for text in _call(node, found, known)]
    return sorted(set(missing))


_ROOTS = {"llm": "llm", "_llm": "llm", "vllm": "vllm", "_vllm": "vllm"}
_ENGINE = "vllm.v1.engine.async_llm.AsyncLLM"


def _dotted(node: ast.AST) -> list[str]:
    """Return the names of an attribute's chain, from `llm` or `vllm` on; nothing if it has another root."""
    names: list[str] = []
    while isinstance(node, ast.Attribute) and node.attr not in _ROOTS:
        names.append(node.attr)
        node = node.value
    root = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return [_ROOTS[root], *reversed(names)] if root in _ROOTS else []


def _owner(names: list[str], found: adapter.Needs) -> str | None:
    """Return the class of which the last name of a chain must be a member, None if that is not known."""
    if len(names) == 2 and names[0] == "llm":
        return _ENGINE
    if len(names) == 3 and names[:2] == ["llm", "model_config"]:
        return "vllm.config.ModelConfig"
    if len(names) == 3 and names[0] == "vllm" and names[1] in found.places:
        return f"{found.places[names[1]][0]}.{names[1]}"
    return None


def _chain(node: ast.Attribute, found: adapter.Needs) -> Iterator[str]:
    owner = _owner(_dotted(node), found)
    if owner and not node.attr.startswith("__") and node.attr not in found.classes.get(owner, {}):
        yield f"{owner}.{node.attr}"


def _call(node: ast.Call, found: adapter.Needs, known: set[str]) -> Iterator[str]:
    if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr") and len(node.args) > 1:
        name = node.args[1]
        if isinstance(name, ast.Constant) and name.value not in known:
            yield f"{node.func.id}(…, {name.value!r})"
    names = _dotted(node.func)
    passed = {keyword.arg for keyword in node.keywords if keyword.arg}
    if len(names) == 2 and names[0] == "vllm" and names[1] in found.places:
        made = f"{found.places[names[1]][0]}.{names[1]}"
        yield from (f"{made}({keyword}=)" for keyword in passed - set(needs.MADE.get(made, ())))
    owner = _owner(names, found)
    member = found.classes.get(owner, {}).get(names[-1]) if owner else None
    if member is not None:
        yield from (f"{owner}.{names[-1]}({keyword}=)" for keyword in passed - set(member.parameters or ()))
