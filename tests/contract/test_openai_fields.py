"""Each field of the pinned vLLM's requests has been read by somebody: it is harmless or bounded, or refused with a reason."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from api_contract.sources import Sources
from support.openai_judged import BOUNDED, CLASSES, HARMLESS, JUDGED, LABELS, MODULES
from triton_vllm.openai.fields import REFUSED, ROUTES

if TYPE_CHECKING:
    from pathlib import Path

Fields = dict[str, set[str]]


def declared(sources: Sources, name: str) -> set[str]:
    """Return the fields of one of vLLM's classes."""
    (module,) = [module for module, names in MODULES.items() if name in names]
    members = sources.members(f"vllm.entrypoints.{module}.protocol.{name}")
    assert members, f"the pinned vLLM has no {name} in {module}"
    annotated = {field: node.annotation for field, node in members.items() if isinstance(node, ast.AnnAssign)}
    return {field for field, hint in annotated.items() if field[0] != "_" and not ast.unparse(hint).startswith("ClassVar")}


@pytest.fixture(scope="module")
def fields(pinned_folder: Path) -> Fields:
    """The fields that a body of each path may have."""
    sources = Sources(pinned_folder)
    return {path: set().union(*(declared(sources, name) for name in names)) for path, names in CLASSES.items()}


def test_each_field_of_the_pinned_vllm_has_been_read(fields: Fields) -> None:
    """At run time it is taken anyway. Read what vLLM does with it, then add it to openai_judged.py or refuse it."""
    unread = {path: fields[path] - JUDGED - REFUSED.keys() - ROUTES[path].refused.keys() for path in CLASSES}
    assert {path: names for path, names in unread.items() if names} == {}


def test_each_path_with_a_body_has_been_read() -> None:
    """Its classes are known."""
    assert {path for path, route in ROUTES.items() if route.method == "POST"} == CLASSES.keys()


def test_no_field_is_judged_twice() -> None:
    """A field is refused or taken. Only the template of a response, `prompt`, has the name of something else."""
    assert JUDGED & REFUSED.keys() == set()
    assert {name for route in ROUTES.values() for name in route.refused} & JUDGED == {"prompt"}
    assert len(JUDGED) == len(LABELS) + len(BOUNDED) + len(HARMLESS)


def test_nothing_is_judged_or_refused_that_vllm_does_not_have(fields: Fields) -> None:
    """Such a name would be left over from an older vLLM."""
    assert (JUDGED | REFUSED.keys()) - set().union(*fields.values()) == set()
    assert {path: route.refused.keys() - fields[path] for path, route in ROUTES.items() if route.refused} == {
        "/v1/responses": set()
    }
