"""Turn a model's pooled numbers into scores of pairs, as vLLM's own server does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triton_vllm.pooling.embedding import Scoring


def answer(scoring: Scoring, values: Sequence[Any]) -> list[Any]:
    """Return the scores in the order of the pairs; if ranked, return objects of index and score, the best first.

    Args:
        scoring: the pairs.
        values: the model's pooled numbers. One number for each pair, or a vector for each query and
            then for each document.
    """
    # Vectors are as many as queries and documents together, so always more than the documents.
    found = _numbers(values) if len(values) == len(scoring.documents) else _cosines(scoring, values)
    if not scoring.ranked:
        return found
    order = sorted(range(len(found)), key=found.__getitem__, reverse=True)
    return [{"index": i, "relevance_score": found[i]} for i in order[: scoring.top or None]]


def _numbers(values: Sequence[Any]) -> list[float]:
    # The model has one label, so there is one number.
    return [float(np.asarray(value).reshape(-1)[0]) for value in values]


def _cosines(scoring: Scoring, values: Sequence[Any]) -> list[float]:
    count = len(scoring.queries)
    vectors = np.asarray(values, np.float64)
    # The minimum avoids a division by zero.
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-8)
    # A single query is multiplied with every document.
    return [float(number) for number in (vectors[:count] * vectors[count:]).sum(axis=1)]
