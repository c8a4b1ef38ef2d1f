"""Each field of vLLM's requests has been read by somebody: it is taken, or refused with a reason."""

from __future__ import annotations

import json

import vllm_contract
from api_contract.bodies import BODIES
from triton_vllm.openai.fields import REFUSED, ROUTES, WITHOUT_EFFECT


def recorded(name: str) -> set[str]:
    """Return the fields of a class in the record of the pinned vLLM."""
    (owner,) = [full for full in BODIES if full.endswith(f".{name}")]
    record = json.loads(vllm_contract.RECORD.read_text("utf-8"))
    fields = {key.rpartition(".")[2]: text for key, text in record.items() if key.rpartition(".")[0] == owner}
    others = ("def (", "ClassVar", "ConfigDict")
    return {field for field, text in fields.items() if field[0] != "_" and not any(other in text for other in others)}


def test_each_field_of_the_pinned_vllm_is_taken_or_refused():
    """What a new vLLM adds is refused as unknown, until it is in one of the two lists."""
    unknown = {
        f"{path}: {field}"
        for path, route in ROUTES.items()
        for name in route.classes
        for field in recorded(name) - route.fields - REFUSED.keys()
    }
    # A template that the server would keep, which is not vLLM's `prompt`.
    assert unknown == {"/v1/responses: prompt"}


def test_no_field_is_taken_and_refused():
    """A field has one meaning."""
    assert {path: route.fields & REFUSED.keys() for path, route in ROUTES.items() if route.fields & REFUSED.keys()} == {}


def test_the_lists_have_no_field_that_vllm_does_not_have():
    """Except the labels, which vLLM ignores."""
    labels = {"metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"}
    labels |= {"service_tier", "store", "user", "verbosity", "model"}
    for path, route in ROUTES.items():
        known = set().union(*(recorded(name) for name in route.classes)) if route.classes else set()
        # Of responses, vLLM ignores this one, too. It says how a stream is padded.
        ignored = labels | {"stream_options"} if path == "/v1/responses" else labels
        assert route.fields - known - ignored == set(), path
        assert not known & WITHOUT_EFFECT.keys(), path
