"""The body of a refusal has the form of the API that was asked."""

from __future__ import annotations

import json

import pytest

from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.openai.refusal import FieldError, body_of


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_paths_have_its_form(path):
    """A client of that API reads the message from there."""
    told = {"type": "error", "error": {"type": "BadRequestError", "message": "too long"}}
    assert json.loads(body_of(InvalidRequestError("too long"), path)) == told


@pytest.mark.parametrize(("error", "param"), [(InvalidRequestError("too long"), None), (FieldError("seed", "too long"), "seed")])
def test_all_others_have_openais(error, param):
    """With the field, if it is known."""
    told = {"message": "too long", "type": "BadRequestError", "param": param, "code": 400}
    assert json.loads(body_of(error, "/v1/chat/completions")) == {"error": told}
