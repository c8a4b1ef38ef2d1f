"""Check the size of structured-output constraints.

vLLM compiles them to automata, which grow faster than their texts.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton_vllm.base.document import check_integers
from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import refuse_above

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from triton_vllm.base.limits import Limits

_REPEATS = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")
_BOUNDS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
# vLLM takes a grammar without such a rule for one in Lark's syntax.
_EBNF = re.compile(r"^(?:(?!#|//).)*?::=", re.MULTILINE)
"""Matches a rule of a grammar for xgrammar, outside comments."""
# Counting on would cost time, and no limit is that large.
MANY_REPETITIONS = 1 << 40
"""Sizes above this one are treated as equal to it."""


@dataclass(frozen=True)
class Constraint:
    """A constraint of the answer, as it is compiled.

    Attributes:
        name: the request's field.
        kind: json, regex, grammar, lark or structural_tag.
        text: the constraint itself.
        seconds: the most processor time that compiling may take.
    """

    name: str
    kind: str
    text: str
    seconds: int


def check(limits: Limits, fields: Mapping[str, Any]) -> None:
    """Check the fields of vLLM's StructuredOutputsParams as the request has them.

    Args:
        limits: the model's limits.
        fields: the values by name. Their types are checked elsewhere.

    Raises:
        InvalidRequestError: a field is empty, or exceeds one of the limits.
    """
    for name in ("json", "regex", "grammar", "structural_tag", "whitespace_pattern", "choice"):
        value = fields.get(name)
        if value is None:
            continue
        if value in ("", [], ()):
            raise InvalidRequestError(f"structured_outputs.{name} must not be empty")
        where = f"structured_outputs.{name}"
        if name == "choice":
            _check_choice(limits, value, where)
        elif name in ("regex", "whitespace_pattern"):
            _check_pattern(limits, value, where)
        elif name == "grammar":
            _check_grammar(limits, value, where)
        else:
            _check_document(limits, value, where)


def to_compile(limits: Limits, params: Any) -> Constraint | None:
    """Return the constraint in vLLM's StructuredOutputsParams that must be tried, or None."""
    # A `choice` need not be tried, because its size limits its cost: at most half a second (65,536
    # characters, 32,000 tokens).
    for name in ("json", "regex", "grammar", "structural_tag"):
        value = getattr(params, name, None)
        # With a limit of 0, no constraint is tried.
        if value is not None and limits.max_constraint_seconds:
            text = value if isinstance(value, str) else json.dumps(value)
            is_lark = name == "grammar" and not _EBNF.search(text)
            kind = "lark" if is_lark else name
            return Constraint(name, kind, text, seconds=limits.max_constraint_seconds)
    return None


def expansion(pattern: str) -> tuple[int, int]:
    """Return the size of a regular expression.

    Returns:
        Its length in characters with its repetitions written out, at most ``MANY_REPETITIONS``, and
        the depth of its parentheses.
    """
    sizes = [0]  # of the pattern, and of each open parenthesis in it
    last = 0  # the size of the part that a repetition would repeat
    deepest = 0
    position = 0
    while position < len(pattern):
        char = pattern[position]
        repeat = _REPEATS.match(pattern, position) if char == "{" else None
        if repeat and any(repeat.groups()):
            # 12 digits exceed any useful limit, and int() refuses very long numbers.
            times = max(int(text[:12]) for text in repeat.groups() if text)
            # The part has already been counted once.
            sizes[-1] += last * max(times - 1, 0)
            last *= max(times, 1)
            if sizes[-1] > MANY_REPETITIONS:
                return MANY_REPETITIONS, deepest
            position = repeat.end()
        elif char == "(":
            sizes.append(0)
            deepest = max(deepest, len(sizes) - 1)
            position += 1
        elif char == ")" and len(sizes) > 1:
            last = sizes.pop() + 1
            sizes[-1] += last
            position += 1
        else:
            last = 1
            sizes[-1] += last
            position = _atom_end(pattern, position)
    return sum(sizes), deepest


def _atom_end(pattern: str, position: int) -> int:
    """Return where the character or class ends that begins at ``position``."""
    if pattern[position] == "\\":
        return position + 2
    if pattern[position] == "[":
        # Directly after "[", a "]" is an ordinary character.
        end = pattern.find("]", position + 2)
        # Nor does an escaped "]" end a class, unless the backslash itself is escaped.
        while end > 0 and pattern[end - 1] == "\\" and pattern[end - 2] != "\\":
            end = pattern.find("]", end + 1)
        return end + 1 if end > 0 else len(pattern)
    return position + 1


def _check_pattern(limits: Limits, value: Any, where: str) -> None:
    """Raise InvalidRequestError if a regular expression is too long, too repetitive or too deep.

    ``where`` is its name in the error.
    """
    # It is missing, or ``coerce`` refuses it later and names the right type.
    if not isinstance(value, str):
        return
    refuse_above(limits.max_constraint_bytes, len(value), f"{where} has", "characters")
    size, depth = expansion(value)
    written_out = f"{where} has, with its repetitions written out,"
    refuse_above(limits.max_constraint_repeats, size, written_out, "characters")
    refuse_above(limits.max_constraint_depth, depth, f"{where} has", "levels of parentheses")


def _check_grammar(limits: Limits, value: Any, where: str) -> None:
    """Raise InvalidRequestError if a grammar is too long, too repetitive or too deep.

    ``where`` is its name in the error.
    """
    # It is missing, or ``coerce`` refuses it later and names the right type.
    if not isinstance(value, str):
        return
    refuse_above(limits.max_constraint_bytes, len(value), f"{where} has", "characters")
    # 12 digits exceed any useful limit, and int() refuses very long numbers.
    repeats = [int(text[:12]) for pair in _REPEATS.findall(value) for text in pair if text]
    most = max(repeats, default=0)
    refuse_above(limits.max_constraint_repeats, most, f"{where} has a repetition of")
    depth = 0
    deepest = 0
    for char in re.findall(r"[()]", value):
        depth += 1 if char == "(" else -1
        deepest = max(deepest, depth)
    refuse_above(limits.max_constraint_depth, deepest, f"{where} has", "levels of parentheses")


def _check_choice(limits: Limits, value: Any, where: str) -> None:
    """Raise InvalidRequestError if a list of the only possible answers is too long.

    ``where`` is its name in the error.
    """
    # ``coerce`` refuses other types later, and names the right one.
    if not isinstance(value, list):
        return
    refuse_above(limits.max_choices, len(value), f"{where} has", "entries")
    length = sum(len(text) for text in value if isinstance(text, str))
    refuse_above(limits.max_constraint_bytes, length, f"{where} has", "characters")


def _check_document(limits: Limits, value: Any, where: str) -> None:
    """Raise InvalidRequestError if a JSON schema or structural tag exceeds a limit.

    Args:
        limits: the model's limits. They also hold for each expression or grammar in the document.
        value: the document, or a string with its JSON.
        where: its name in the error.
    """
    text = value if isinstance(value, str) else json.dumps(value)
    refuse_above(limits.max_constraint_bytes, len(text), f"{where} has", "characters")
    try:
        schema = json.loads(text) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"{where} is not valid JSON") from None
    # A grammar's compiler cannot hold larger ones.
    check_integers(schema, where)
    choices = 0
    for node in _objects(schema):
        if isinstance(node.get("enum"), list):
            choices += len(node["enum"])
        for name in ("pattern", "regex"):
            _check_pattern(limits, node.get(name), f"{where}: {name}")
        _check_grammar(limits, node.get("grammar"), f"{where}: grammar")
        for name in _BOUNDS:
            bound = node.get(name)
            if isinstance(bound, int | float):
                # In Python, 1e999 in JSON becomes infinity, which int() refuses.
                size = int(bound) if abs(bound) < MANY_REPETITIONS else MANY_REPETITIONS
                refuse_above(limits.max_constraint_repeats, size, f"{where} has a {name} of")
    refuse_above(limits.max_choices, choices, f"{where} has", "entries of enumerations")


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the objects at any depth of a JSON value."""
    # Without recursion: a deep document must not exhaust the stack.
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
