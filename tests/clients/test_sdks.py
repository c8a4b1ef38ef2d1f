"""Users' packages get from the port what they get from vLLM's own server of the same environment, whole and streamed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from clients.lane import HERE

if TYPE_CHECKING:
    from clients.lane import Clients, Lane

pytestmark = pytest.mark.e2e
CALLS = re.findall(r"^@call\ndef (\w+)", (HERE / "sdks.py").read_text("utf-8"), re.MULTILINE)
REFUSED_BY_BOTH = {
    "openai_response_with_a_grammar": 400,  # vLLM has no grammars of custom tools
    "openai_embedding": 404,  # the model generates
    "litellm_embedding": 404,
    "langchain_embedding": 404,
    "openai_unknown_model": 404,
    "anthropic_unknown_model": 404,
}
DIFFERENT: dict[str, str] = {}
"""Calls that our port answers in another way than vLLM's server, with the reason."""
RANDOM = {"id", "call_id", "created", "created_at", "completed_at", "system_fingerprint", "item_id", "signature"}
"""What no two answers have in common."""


@pytest.fixture(scope="module")
def answers(clients: Clients, lane: Lane, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each call got from our port, and from vLLM's server."""
    return [clients.run("sdks.py", url, home=tmp_path_factory.mktemp("sdks")) for url in (lane.ours, lane.theirs)]


def same(value: Any) -> Any:
    """Return an answer without what is random or a matter of time."""
    if isinstance(value, dict):
        return {key: same(item) for key, item in value.items() if key not in RANDOM}
    if isinstance(value, str):  # vLLM's parser passes this on if it comes in a piece of its own
        return value.replace("<think>", "")
    return [same(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gets_what_vllms_server_gives(answers: list[dict[str, Any]], name: str) -> None:
    """The answer with its tool calls, or the error's class and status."""
    ours, theirs = (answer[name] for answer in answers)
    assert theirs["status"] == REFUSED_BY_BOTH.get(name, 200), theirs
    if name in DIFFERENT:
        assert same(ours) != same(theirs), "no longer different"
        return
    assert ours["status"] == theirs["status"], ours
    assert same(ours.get("answer")) == same(theirs.get("answer"))
    assert ours.get("error") == theirs.get("error"), ours
