"""Scores and ranks by a cross-encoder: pairs in, the numbers of vLLM's own server out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support.model_requests import Answer
from support.openai_server import kept_server
from support.reference import ONE_THREAD
from support.serving import MORE_ARGUMENTS
from support.triton_client import stream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.models import MadeModels
    from support.serving import Parts, Serve
    from vllm_env.serve.server import TritonServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
QUERY = "The capital of France is"
DOCUMENTS = ["Paris", "Once upon a time there was", "The most dangerous animal is the", "Paris is the capital of France"]
SCORES: dict[str, dict[str, Any]] = {
    "one query": {"text_1": QUERY, "text_2": DOCUMENTS},
    "many queries": {"text_1": DOCUMENTS[::-1], "text_2": DOCUMENTS},
    "one pair": {"text_1": QUERY, "text_2": DOCUMENTS[3]},
    "queries": {"queries": QUERY, "documents": DOCUMENTS[:2]},
}
RANKS: dict[str, dict[str, Any]] = {
    "all": {"query": QUERY, "documents": DOCUMENTS},
    "best": {"query": QUERY, "documents": DOCUMENTS, "top_n": 2},
}


@pytest.fixture(scope="module")
def engine_args(made_models: MadeModels) -> dict[str, Any]:
    """Both servers'."""
    return {"model": str(made_models.cross_encoder), "runner": "pooling", "max_model_len": 128, "dtype": "float32"}


@pytest.fixture(scope="module")
def expected(parts: Parts, engine_args: dict[str, Any], session_folder: Path) -> dict[str, Any]:
    """What vLLM's own server answers; if it was started, it has ended before ours begins."""
    both = {**MORE_ARGUMENTS, **engine_args, "enforce_eager": True}
    with kept_server(parts.environment, both, session_folder / "scores.log") as server:
        scores = {name: json.loads(server.ask("/score", {"model": "", **body})) for name, body in SCORES.items()}
        ranks = {name: json.loads(server.ask("/rerank", {"model": "", **body})) for name, body in RANKS.items()}
    return {
        **{name: ([d["score"] for d in a["data"]], a["usage"]["prompt_tokens"]) for name, a in scores.items()},
        **{name: ([(r["index"], r["relevance_score"]) for r in a["results"]], None) for name, a in ranks.items()},
    }


@pytest.fixture(scope="module")
def cross_encoder(serving: Serve, engine_args: dict[str, Any], expected: dict[str, Any]) -> Iterator[TritonServer]:
    """Our server with the cross-encoder."""
    with serving(engine_args, environment=ONE_THREAD) as running:
        yield running


def ask(server: TritonServer, request: dict[str, Any], **tensors: Any) -> Answer:
    """Ask for scores or ranks."""
    found = stream(server.grpc_url, [{"embedding_request": json.dumps(request), **tensors}])
    return Answer(tuple(r for r in found if r.tensors or r.error))


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_those_of_vllms_own_server(cross_encoder: TritonServer, expected: dict[str, Any], name: str) -> None:
    """A number for each pair, and the tokens of all."""
    answer = ask(cross_encoder, SCORES[name], return_num_input_tokens=True)
    scores, tokens = expected[name]
    assert [json.loads(text) for text in answer.texts()] == pytest.approx(scores, abs=1e-5)
    assert answer.values("num_input_tokens") == [[tokens]]
    assert len(set(scores)) == len(scores)


@pytest.mark.parametrize("name", RANKS)
def test_ranks_are_those_of_vllms_own_server(cross_encoder: TritonServer, expected: dict[str, Any], name: str) -> None:
    """Best first, each with its index."""
    ranks = [json.loads(text) for text in ask(cross_encoder, RANKS[name]).texts()]
    assert [item["index"] for item in ranks] == [index for index, _ in expected[name][0]]
    assert [item["relevance_score"] for item in ranks] == pytest.approx([score for _, score in expected[name][0]], abs=1e-5)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"query": QUERY}, "embedding_request must have query and documents"),
        ({"query": QUERY, "documents": ["a"] * 257}, "documents has 257 texts; this model takes at most 256"),
        ({"query": "long " * 300, "documents": DOCUMENTS}, "maximum"),
        ({"query": QUERY, "documents": DOCUMENTS, "pooling_params": {"activation": 1}}, "did you mean 'use_activation'?"),
        ({"input": QUERY}, "does not support 'embed' request"),
    ],
)
def test_bad_requests_are_refused_and_the_next_is_served(
    cross_encoder: TritonServer, expected: dict[str, Any], given: dict[str, Any], says: str
) -> None:
    """By name; nothing of a refused request stays in vLLM."""
    assert says in ask(cross_encoder, given).error
    found = [json.loads(text) for text in ask(cross_encoder, SCORES["one query"]).texts()]
    assert found == pytest.approx(expected["one query"][0], abs=1e-5)
