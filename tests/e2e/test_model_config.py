"""What a model's configuration may leave out, on a server that does not complete it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from support.model_control import load
from support.serving import EXPLICIT

if TYPE_CHECKING:
    from support.serving import Serve

pytestmark = pytest.mark.e2e


def test_a_server_that_completes_nothing_says_what_to_do(light_serving: Serve) -> None:
    """The load ends with a reason; else each request would fail with an error about a tensor."""
    with light_serving(arguments=(EXPLICIT, "--disable-auto-complete-config")) as server:
        status, answer = load(server)
        assert status == 400
        assert "start tritonserver without --disable-auto-complete-config" in json.loads(answer)["error"]
