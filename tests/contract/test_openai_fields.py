"""Each field of the pinned vLLM's requests has been read by somebody: it is harmless or bounded, or refused with a reason."""

from __future__ import annotations

import json

import vllm_contract
from api_contract.bodies import BODIES
from support.openai_judged import BOUNDED, CLASSES, HARMLESS, JUDGED, LABELS
from triton_vllm.openai.fields import REFUSED, ROUTES


def recorded(name: str) -> set[str]:
    """Return the fields of a class in the record of the pinned vLLM."""
    (owner,) = [full for full in BODIES if full.endswith(f".{name}")]
    record = json.loads(vllm_contract.RECORD.read_text("utf-8"))
    fields = {key.rpartition(".")[2]: text for key, text in record.items() if key.rpartition(".")[0] == owner}
    others = ("def (", "ClassVar", "ConfigDict")
    return {field for field, text in fields.items() if field[0] != "_" and not any(other in text for other in others)}


def fields(path: str) -> set[str]:
    """Return the fields that a body of this path may have."""
    return set().union(*map(recorded, CLASSES[path]))


def test_each_field_of_the_pinned_vllm_has_been_read():
    """At run time it is taken anyway. Read what vLLM does with it, then add it to openai_judged.py or refuse it."""
    unread = {path: fields(path) - JUDGED - REFUSED.keys() - ROUTES[path].refused.keys() for path in CLASSES}
    assert {path: names for path, names in unread.items() if names} == {}


def test_each_path_with_a_body_has_been_read():
    """Its classes are in the record."""
    assert {path for path, route in ROUTES.items() if route.method == "POST"} == CLASSES.keys()


def test_no_field_is_judged_twice():
    """A field is refused or taken. Only the template of a response, `prompt`, has the name of something else."""
    assert JUDGED & REFUSED.keys() == set()
    assert {name for route in ROUTES.values() for name in route.refused} & JUDGED == {"prompt"}
    assert len(JUDGED) == len(LABELS) + len(BOUNDED) + len(HARMLESS)


def test_nothing_is_judged_or_refused_that_vllm_does_not_have():
    """Such a name would be left over from an older vLLM."""
    known = {path: fields(path) for path in CLASSES}
    assert (JUDGED | REFUSED.keys()) - set().union(*known.values()) == set()
    assert {path: route.refused.keys() - known[path] for path, route in ROUTES.items() if route.refused} == {
        "/v1/responses": set()
    }
