"""Embeddings: `embedding_request` in, numbers as JSON out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support.model_requests import Answer, ask
from support.reference import kept_reference
from support.triton_client import stream

if TYPE_CHECKING:
    from support.models import MadeModels
    from support.serving import Parts
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
TEXT = "The capital of France is"
WIDTH = 64  # hidden size of the model
FLAGS: dict[str, Any] = {"return_num_input_tokens": True, "return_num_output_tokens": True}


def embed(server: TritonServer, source: Any, pooling: dict[str, Any] | None = None, **tensors: Any) -> Answer:
    """Asks for an embedding."""
    request = {"input": source, **({"pooling_params": pooling} if pooling else {})}
    found = stream(server.grpc_url, [{"embedding_request": json.dumps(request), **tensors}])
    return Answer(tuple(r for r in found if r.tensors or r.error))


def test_embedding_equals_that_of_transformers(embedding_server: TritonServer, made_models: MadeModels, parts: Parts) -> None:
    """The vector is the model's own, normalised: the reference is transformers on the same checkpoint."""
    answer = embed(embedding_server, TEXT, **FLAGS)
    vector = json.loads(answer.text)
    request = {"model": str(made_models.embedding), "texts": [TEXT]}
    (reference,) = kept_reference(parts.environment, "reference_embedding.py", request, made_models.embedding)
    assert len(vector) == WIDTH
    assert vector == pytest.approx(reference["vector"], abs=1e-3)
    assert answer.values("num_input_tokens") == [[len(reference["token_ids"])]]
    assert answer.values("num_output_tokens") == [[0]]


def test_token_ids_and_text_give_the_same(embedding_server: TritonServer, made_models: MadeModels, parts: Parts) -> None:
    """A list of token ids is an input as good as their text."""
    request = {"model": str(made_models.embedding), "texts": [TEXT]}
    (reference,) = kept_reference(parts.environment, "reference_embedding.py", request, made_models.embedding)
    by_ids = json.loads(embed(embedding_server, reference["token_ids"]).text)
    assert by_ids == pytest.approx(json.loads(embed(embedding_server, TEXT).text), abs=1e-5)


@pytest.mark.parametrize(
    ("request_json", "text"),
    [
        ('{"input": ""}', "embedding_request.input must be a non-empty string"),
        ('{"input": "x", "pooling_params": {"dimension": 3}}', "did you mean 'dimensions'?"),
        ('{"input": "x", "pooling_params": {"dimensions": 3}}', "dimensions"),
        ('{"input": "x", "pooling_params": []}', None),
        ('{"input": "%s"}' % ("long " * 300), "maximum"),
    ],
)
def test_bad_embedding_requests(embedding_server: TritonServer, request_json: str, text: str | None) -> None:
    """An error names the trouble, and the next request is served."""
    found = stream(embedding_server.grpc_url, [{"embedding_request": request_json}])
    error = "".join(response.error for response in found)
    if text is not None:
        assert text in error
    assert len(json.loads(embed(embedding_server, TEXT).text)) == WIDTH


def test_several_inputs_have_an_element_each(embedding_server: TritonServer) -> None:
    """Texts or token ids, each embedded as it would be alone; the count of tokens is that of all."""
    texts = [TEXT, "Paris", "Once upon a time"]
    alone = [embed(embedding_server, text, **FLAGS) for text in texts]
    together = embed(embedding_server, texts, **FLAGS)
    assert len(together.values("text_output")[0]) == 3
    for text, answer in zip(together.texts(), alone, strict=True):
        assert json.loads(text) == pytest.approx(json.loads(answer.text), abs=1e-5)
    assert together.values("num_input_tokens") == [[sum(answer.values("num_input_tokens")[0][0] for answer in alone)]]
    assert together.values("num_output_tokens") == [[0]]
    assert json.loads(embed(embedding_server, [[5, 6], [7]]).texts()[0]) == pytest.approx(
        json.loads(embed(embedding_server, [5, 6]).text), abs=1e-5
    )


def test_one_bad_input_of_several_refuses_all(embedding_server: TritonServer) -> None:
    """The error is that of the one, and nothing of the others stays behind."""
    assert "maximum" in embed(embedding_server, [TEXT, "long " * 300, TEXT]).error
    assert "vocabulary" in embed(embedding_server, [[1], [10**6]]).error
    assert len(embed(embedding_server, [TEXT] * 40).texts()) == 40


def test_an_embedding_model_scores_by_the_angle_of_its_vectors(embedding_server: TritonServer) -> None:
    """As vLLM's own server does with such a model."""
    query, *documents = ("Paris", "The capital of France is", "Once upon a time", "Paris")
    vectors = [json.loads(text) for text in embed(embedding_server, [query, *documents]).texts()]
    angles = [sum(a * b for a, b in zip(vectors[0], vector, strict=True)) for vector in vectors[1:]]  # of length 1 each
    request = json.dumps({"query": query, "documents": documents, "top_n": 2})
    found = stream(embedding_server.grpc_url, [{"embedding_request": request}])
    ranked = [json.loads(text) for text in Answer(tuple(r for r in found if r.tensors or r.error)).texts()]
    assert [item["index"] for item in ranked] == sorted(range(3), key=angles.__getitem__, reverse=True)[:2]
    assert [item["relevance_score"] for item in ranked] == pytest.approx(sorted(angles, reverse=True)[:2], abs=1e-5)


def test_generating_is_not_for_this_model(embedding_server: TritonServer) -> None:
    """A prompt to an embedding model is refused in the official backend's words."""
    assert "does not support 'generate' request" in ask(embedding_server, TEXT, {"max_tokens": 3}).error
