"""Inputs of an embedding request, and pairs to score, are read and bounded."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from triton_vllm.base.dialect import OFFICIAL
from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import USUAL
from triton_vllm.engine.order import Prompt
from triton_vllm.pooling.scores import Scoring
from triton_vllm.request.embedding import EmbedRequest
from triton_vllm.request.parse import parse


def read(limits=USUAL, **values) -> Any:
    return parse({"embedding_request": np.array([json.dumps(values).encode()], np.object_)}, "", limits=limits)


@pytest.mark.parametrize(
    ("source", "prompts"),
    [
        ("a", (Prompt("a"),)),
        (["a", "b"], (Prompt("a"), Prompt("b"))),
        ([1, 2], (Prompt(token_ids=(1, 2)),)),
        ([[1, 2], [3]], (Prompt(token_ids=(1, 2)), Prompt(token_ids=(3,)))),
    ],
)
def test_one_input_or_several(source, prompts):
    """Texts, or token ids, as vLLM's own server takes them."""
    assert read(input=source).prompts == prompts
    assert read(input=source).scoring is None


@pytest.mark.parametrize("source", [None, "", [], ["a", ""], ["a", 1], [[1], []], [[1], [-1]], [[True]], [1, "a"], [["a"]], {}])
def test_wrong_inputs_are_refused(source):
    """All of them, if one is wrong."""
    with pytest.raises(
        InvalidRequestError, match=r"^embedding_request.input must be a non-empty string or list of token ids, or"
    ):
        read(input=source)


@pytest.mark.parametrize(
    ("given", "scoring"),
    [
        ({"query": "q", "documents": ["a", "b"], "top_n": 1}, Scoring(("q",), ("a", "b"), ranked=True, top=1)),
        ({"queries": "q", "documents": ["a", "b"]}, Scoring(("q",), ("a", "b"))),
        ({"text_1": "q", "text_2": "a"}, Scoring(("q",), ("a",))),
        ({"text_1": ["q", "r"], "text_2": ["a", "b"]}, Scoring(("q", "r"), ("a", "b"))),
    ],
)
def test_pairs_to_score(given, scoring):
    """By the names of vLLM's own server; what makes them up is for the model to say."""
    assert read(**given).scoring == scoring
    assert read(**given).prompts == ()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"query": "q"}, "must have query and documents"),
        ({"query": "q", "documents": ["a"], "input": "a"}, "either input, or the two sides"),
        ({"query": ["q", "r"], "documents": ["a", "b"]}, "embedding_request.query must be a non-empty string$"),
        ({"queries": ["q", "r"], "documents": ["a"]}, "queries must be one text or as many as documents: 1, not 2"),
        ({"query": "q", "documents": ["a", 1]}, "embedding_request.documents must be"),
        ({"query": "q", "documents": ["a"], "top_n": -1}, "top_n must be a number"),
        ({"query": "q", "documents": ["a"], "top_n": True}, "top_n must be a number"),
        ({"text_1": "q", "text_2": "a", "top_n": 1}, "goes with query"),
        ({"query": "q", "documents": ["a"], "topn": 1}, "embedding_request has no field 'topn'"),
    ],
)
def test_wrong_pairs_are_refused(given, says):
    """By the name of the field."""
    with pytest.raises(InvalidRequestError, match=says):
        read(**given)


@pytest.mark.parametrize("name", ["dimensions", "cache_salt", "documents_", "encoding_format"])
def test_what_is_not_known_is_refused_unless_it_is_officially_ignored(name):
    """Half the width, or a cache of one's own, was asked for and would not be there."""
    with pytest.raises(InvalidRequestError, match=f"embedding_request has no field '{name}'; vLLM's pooling parameters go into"):
        read(input="a", **{name: 1})
    text = json.dumps({"input": "a", name: 1}).encode()
    request = parse({"embedding_request": np.array([text], np.object_)}, "", dialect=OFFICIAL)
    assert isinstance(request, EmbedRequest)
    assert request.prompts == (Prompt(text="a"),)


def test_no_number_of_documents_is_all_of_them():
    """As null in vLLM's own server."""
    assert read(query="q", documents=["a", "b"], top_n=None).scoring == read(query="q", documents=["a", "b"], top_n=0).scoring
