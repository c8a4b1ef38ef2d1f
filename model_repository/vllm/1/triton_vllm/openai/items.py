"""Bound the items of a response's input that vLLM may refuse.

vLLM takes an item for one of more than thirty kinds. If an item is none of them, pydantic makes an
error for nearly each field of each kind: 230 errors for `{"role": 5}` (vLLM 0.32). A body of 80 KB
with 4096 of these took 35 s of processor time, and gigabytes of memory. So only a few items of a
request may differ from the forms below, which vLLM takes for certain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.limits import refuse_above
from triton_vllm.openai.refusal import FieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Check = Callable[[Any], bool]
    Form = Mapping[str, Check]

# Such an item takes vLLM 10 ms.
MOST_OTHERS = 16
"""The most items of a request that have none of the forms."""
MOST_VALUES = 512
"""The most JSON values of all these items."""
_ABSENT = object()


def _is_absent(value: Any) -> bool:
    return value is _ABSENT


def _is_null(value: Any) -> bool:
    return value is None or value is _ABSENT


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_empty(value: Any) -> bool:
    return isinstance(value, list) and not value


def _one_of(*values: str) -> Check:
    return lambda value: isinstance(value, str) and value in values


def _either(*checks: Check) -> Check:
    return lambda value: any(check(value) for check in checks)


def _list_of(*forms: Form) -> Check:
    return lambda value: isinstance(value, list) and all(_has_a_form(one, forms) for one in value)


def _has_a_form(value: Any, forms: Sequence[Form]) -> bool:
    return isinstance(value, dict) and any(
        value.keys() <= form.keys()
        and all(check(value.get(name, _ABSENT)) for name, check in form.items())
        for form in forms
    )


_ID = _either(_is_null, _is_text)
_STATE = _one_of("in_progress", "completed", "incomplete")
_STATUS = _either(_is_null, _STATE)
_INPUT_TEXTS = _list_of({"type": _one_of("input_text"), "text": _is_text})
_REFUSAL = {"type": _one_of("refusal"), "refusal": _is_text}
_OUTPUT_TEXT = {
    "type": _one_of("output_text"),
    "text": _is_text,
    "annotations": _is_empty,
    "logprobs": _either(_is_null, _is_empty),
}
_REASONING = {
    "type": _one_of("reasoning"),
    "id": _is_text,
    "summary": _list_of({"type": _one_of("summary_text"), "text": _is_text}),
    "content": _either(_is_null, _list_of({"type": _one_of("reasoning_text"), "text": _is_text})),
    "encrypted_content": _ID,
    "status": _STATUS,
}
_ANSWER = {
    "type": _one_of("message"),
    "role": _one_of("assistant"),
    "id": _is_text,
    "status": _STATE,
    "content": _list_of(_OUTPUT_TEXT, _REFUSAL),
    "phase": _is_null,
}
FORMS: tuple[Form, ...] = (
    {
        "type": _either(_is_absent, _one_of("message")),
        "role": _one_of("user", "assistant", "system", "developer"),
        "content": _either(_is_text, _INPUT_TEXTS),
        "phase": _is_null,
        "id": _ID,
        "status": _STATUS,
    },
    _ANSWER,
    {
        "type": _one_of("function_call"),
        "call_id": _is_text,
        "name": _is_text,
        "arguments": _is_text,
        "id": _ID,
        "status": _STATUS,
        **dict.fromkeys(("async", "caller", "namespace"), _is_null),
    },
    {
        "type": _one_of("function_call_output"),
        "call_id": _is_text,
        "output": _either(_is_text, _INPUT_TEXTS),
        "id": _ID,
        "status": _STATUS,
        **dict.fromkeys(("caller", "name", "namespace"), _is_null),
    },
    _REASONING,
)
"""Forms of items that each vLLM takes."""
# Codex leaves out what only a server that keeps responses needs.
INCOMPLETE: tuple[Form, ...] = (
    {**_REASONING, "id": _either(_is_absent, _is_text)},
    {
        **_ANSWER,
        "id": _either(_is_absent, _is_text),
        "status": _either(_is_absent, _STATE),
        "content": _list_of(
            {**_OUTPUT_TEXT, "annotations": _either(_is_absent, _is_empty)}, _REFUSAL
        ),
    },
)
"""Forms that only those versions take that complete items."""


def check_forms(items: Sequence[Mapping[str, Any]]) -> None:
    """Return if vLLM can refuse the items at little cost.

    Raises:
        AdapterError: too many of them have none of the forms.
    """
    others = [number for number, item in enumerate(items) if not _has_a_form(item, FORMS)]
    if len(others) > MOST_OTHERS and vllm_api.completes_items():
        others = [number for number in others if not _has_a_form(items[number], INCOMPLETE)]
    if len(others) > MOST_OTHERS:
        number = others[MOST_OTHERS]
        raise FieldError(
            "input",
            f"input[{number}] has missing, wrong or unusual fields, like {MOST_OTHERS} items "
            "before it; more are not taken",
        )
    values = sum(count_values(items[number], MOST_VALUES) for number in others)
    refuse_above(MOST_VALUES, values, "the items of input with unusual fields have", "values")


def count_values(value: Any, enough: int) -> int:
    """Return the number of values in a JSON value, or a number above ``enough``."""
    count = 0
    waiting = [value]
    while waiting and count <= enough:
        node = waiting.pop()
        count += 1
        if isinstance(node, dict):
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return count
