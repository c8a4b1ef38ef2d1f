"""Bound the errors of a body's lists.

vLLM takes an item of a response's input for one of more than thirty kinds, and a tool for one of
sixteen. If an item is none of them, pydantic makes an error for nearly each field of each kind: 233
errors for `{"role": 5}` (vLLM 0.32). A body of 80 KB with 4096 of these took vLLM 35 s of processor
time, and gigabytes of memory. So the errors are counted, a few items at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton_vllm.base.limits import refuse_above
from triton_vllm.openai.refusal import FieldError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from triton_vllm.vllm_api import BodyType

# vLLM answers so many within 20 ms.
MOST_ERRORS = 4096
"""The most errors of a list that vLLM may answer."""
# Each call checks a whole request. With one item in each, 4096 items took three times as long.
_AT_ONCE = 16
"""The most items in one call of vLLM."""
_PARTS = ("content", "output", "summary")
"""The fields of an item that may be lists of parts."""
_REQUIRED = {"model": "", "input": ""}
"""The fields that a request for a response must have."""


@dataclass(frozen=True)
class Listed:
    """A list whose items are of one of many kinds.

    Attributes:
        kind: what vLLM takes on the path.
        name: the field.
        items: its value.
        most_values: the most JSON values of an item.
    """

    kind: BodyType
    name: str
    items: Sequence[Any]
    most_values: int

    async def check(self, take_turn: Callable[[], Awaitable[None]]) -> None:
        """Return if vLLM can refuse the items at little cost.

        Args:
            take_turn: waits until others have had their turn.

        Raises:
            AdapterError: an item is too large, or the items have too many errors.
        """
        errors = 0
        # The number of the first item after this group, for the error.
        end = 0
        for group, times in self._groups():
            end += len(group)
            errors += times * self.kind.errors({**_REQUIRED, self.name: group})
            if errors > MOST_ERRORS:
                place = f"{self.name}[{end - len(group)}] to {self.name}[{end - 1}]"
                raise FieldError(
                    self.name,
                    f"{place} have missing, wrong or unknown fields: up to there, vLLM finds "
                    f"{MOST_ERRORS} errors or more",
                )
            await take_turn()

    def _groups(self) -> Iterator[tuple[list[Any], int]]:
        """Yield the items in groups for one call of vLLM, and how often a group's errors count.

        A shortened item is a group of its own. Its errors count once for each part that it had.

        Raises:
            InvalidRequestError: an item is too large.
        """
        group: list[Any] = []
        values = 0
        for number, item in enumerate(self.items):
            short, times = _shortened(item)
            count = count_values(short, self.most_values)
            refuse_above(self.most_values, count, f"{self.name}[{number}] has", "values or more")
            is_full = len(group) == _AT_ONCE or values + count > self.most_values
            if group and (is_full or times > 1):
                yield group, 1
                group = []
                values = 0
            if times > 1:
                yield [short], times
            else:
                group.append(short)
                values += count
        if group:
            yield group, 1


def _shortened(item: Any) -> tuple[Any, int]:
    """Return an item with only the first of its parts, and how many it had.

    An item whose parts differ in more than their texts is returned as it is, with 1. A message may
    have thousands of texts. As nothing but the text differs, vLLM takes all or none.
    """
    for name in _PARTS if isinstance(item, dict) else ():
        parts = item.get(name)
        if isinstance(parts, list) and len(parts) > 1 and _are_alike(parts):
            return {**item, name: parts[:1]}, len(parts)
    return item, 1


def _are_alike(parts: list[Any]) -> bool:
    """Return whether all parts have the same type and a text, and nothing else."""
    kind = parts[0].get("type") if isinstance(parts[0], dict) else None
    return isinstance(kind, str) and all(
        isinstance(part, dict)
        and len(part) == 2
        and part.get("type") == kind
        and isinstance(part.get("text"), str)
        for part in parts
    )


def drop_log_probabilities(items: Any) -> bool:
    """Remove the log probabilities of earlier answers from a response's input; return if any were.

    Clients send an answer back as it came. vLLM reads its text only, and the figures of 25 tokens
    would be more values than an item may have.
    """
    found = False
    for item in items if isinstance(items, list) else ():
        parts = item.get("content") if isinstance(item, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and part.get("type") == "output_text":
                found |= part.pop("logprobs", None) is not None
    return found


def count_values(value: Any, enough: int) -> int:
    """Return the number of values in a JSON value, or a number above ``enough``.

    A value named ``parameters``, such as a tool's schema, counts as one: vLLM takes any.
    """
    count = 0
    waiting = [value]
    while waiting and count <= enough:
        node = waiting.pop()
        count += 1
        if isinstance(node, dict):
            waiting += [inner for name, inner in node.items() if name != "parameters"]
            if "parameters" in node:
                count += 1
        elif isinstance(node, list):
            waiting += node
    return count
