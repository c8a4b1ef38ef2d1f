"""Which items of a response's input may come in any number. tests/hostile/test_openai_port.py has vLLM's own judgement."""

from __future__ import annotations

import copy

import pytest

from hostile.openai_items import INCOMPLETE, TAKEN
from triton_vllm import vllm_api
from triton_vllm.base.errors import AdapterError
from triton_vllm.openai.items import MOST_OTHERS, MOST_VALUES, check_forms, count_values

MANY = MOST_OTHERS + 1


@pytest.fixture(autouse=True)
def _completing(monkeypatch):
    monkeypatch.setattr(vllm_api, "completes_items", lambda: True)


@pytest.mark.parametrize("item", [*TAKEN, *INCOMPLETE], ids=str)
def test_usual_items_may_be_many(item):
    """Those of clients that send a conversation back as they got it."""
    check_forms([item] * 4096)


@pytest.mark.parametrize("item", INCOMPLETE, ids=str)
def test_an_older_vllm_completes_nothing(item, monkeypatch):
    """So it would refuse each of them at length."""
    monkeypatch.setattr(vllm_api, "completes_items", lambda: False)
    check_forms([item] * MOST_OTHERS)
    with pytest.raises(AdapterError, match="unusual fields"):
        check_forms([item] * MANY)


def changes():
    """Yield each item with one value that is another, or with one value more."""
    for item in TAKEN:
        for name in item:
            yield {**item, name: 5}
        for name in ("content", "summary"):
            parts = item.get(name)
            if isinstance(parts, list) and parts:
                for key in parts[0]:
                    changed = copy.deepcopy(item)
                    changed[name][0][key] = [5]
                    yield changed
                yield {**item, name: [*parts, {}]}
                yield {**item, name: [5]}
        yield {**item, "x": {"y": 1}}


@pytest.mark.parametrize("item", [{"role": 5}, {}, {"type": None, "role": "user", "content": "a"}, *changes()], ids=str)
def test_others_may_be_few(item):
    """vLLM says what is wrong with a few."""
    check_forms([*TAKEN, *[item] * MOST_OTHERS])
    with pytest.raises(AdapterError, match=rf"input\[{len(TAKEN) + MOST_OTHERS}\] has missing, wrong or unusual fields"):
        check_forms([*TAKEN, *[item] * MANY])


def test_the_values_of_others_are_bounded():
    """One with a long list costs as much as many."""
    check_forms([{"role": 5, "content": [5] * (MOST_VALUES - 3)}])
    with pytest.raises(AdapterError, match="values"):
        check_forms([{"role": 5, "content": [5] * MOST_VALUES}])


def test_values_are_counted_as_far_as_needed():
    """A list of a million is not read to its end."""
    assert count_values({"a": [1, {"b": None}], "c": "text"}, 100) == 6
    assert 3 < count_values([1, 2, 3, 4, 5], 3) <= 6
