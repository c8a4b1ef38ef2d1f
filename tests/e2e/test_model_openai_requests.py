"""Today's clients and future ones: our port answers each request with the status of vLLM's own server, but for a few."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from support.openai_requests import CHAT, RESPONSES, requests
from support.openai_server import openai_server
from support.settings import openai_url
from triton_vllm.openai.fields import REFUSED, ROUTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.serving import Parts
    from vllm_env.serve.server import TritonServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
MOST_DIFFERENCES = 12
FIELDS = {
    f"{RESPONSES}: an earlier response": "previous_response_id",  # 404 there
    f"{RESPONSES}: all messages": "enable_response_messages",
    f"{RESPONSES}: earlier messages": "previous_input_messages",
    f"{CHAT}: a name for the request": "request_id",
    f"{CHAT}: a session": "session_id",
    f"{CHAT}: beams": "use_beam_search",
    f"{CHAT}: arguments of extensions": "vllm_xargs",
    f"{CHAT}: a transfer": "kv_transfer_params",
}
"""Requests with a field that `REFUSED` or its route refuses, and that vLLM takes."""
PATHS = {
    "GET /openapi.json": "it describes paths that are not served",
    "POST /invocations": "it takes the body of any path, and no check knows of which one",
    "POST /v1/chat/completions/render": "it is for other servers; 403 there",
}
"""Paths that vLLM serves, with the reason for which the port does not."""


@pytest.fixture(scope="module")
def theirs(chat_arguments: dict[str, Any], parts: Parts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM's own server of the same environment, with the same model under the same name."""
    options = {**chat_arguments, "served_model_name": "vllm", "tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    with openai_server(parts.environment, options, tmp_path_factory.mktemp("openai") / "openai.log") as url:
        yield url


def asked(url: str, method: str, path: str, body: Any) -> tuple[int, str]:
    """Return the status and the text of an answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_status_is_that_of_vllms_server(chat_server: TritonServer, theirs: str) -> None:
    """Except for what is refused with a reason."""
    url = openai_url(chat_server)
    found = {}
    with ThreadPoolExecutor(1) as pool:
        for name, request in requests().items():
            other = pool.submit(asked, theirs, *request)
            own = asked(url, *request)
            found[name] = (own, other.result())
    different = {name: (own, other) for name, (own, other) in found.items() if own[0] != other[0]}
    counts = {status: [own[0] for own, _ in found.values()].count(status) for status in (200, 400, 404, 405)}
    print(f"{len(found)} requests, {len(different)} differences; our statuses: {counts}")
    print(
        *(f"  {name}: {own[0]} {own[1][:200]} / {other[0]} {other[1][:300]}" for name, (own, other) in different.items()),
        sep="\n",
    )
    assert len(found) >= 160
    assert different.keys() == FIELDS.keys() | PATHS.keys()
    assert len(different) <= MOST_DIFFERENCES
    for name, field in FIELDS.items():
        path = name.partition(":")[0]
        reason = REFUSED.get(field) or ROUTES[path].refused[field]
        assert f"'{field}' is not taken from a request: {reason}" in different[name][0][1]
