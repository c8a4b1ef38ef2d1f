"""Turn a model's pooled numbers into scores of pairs, as vLLM's own server does."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Scoring:
    """Pairs of texts to score: one query for all documents, or one query for each.

    With ``ranked``, the answer has the best documents first, at most ``top`` of them (0 = all).
    """

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    ranked: bool = False
    top: int = 0


def answer(scoring: Scoring, values: Sequence[Any]) -> list[Any]:
    """Return the scores of pairs.

    Args:
        scoring: the pairs.
        values: the model's pooled numbers. One number for each pair, or a vector for each query and
            then for each document.

    Returns:
        The scores in the order of the pairs. If ranked, objects of index and score, the best first.
    """
    # Vectors are as many as queries and documents together, so always more than the documents.
    if len(values) == len(scoring.documents):
        # The model has one label, so there is one number.
        scores = [float(np.asarray(value).reshape(-1)[0]) for value in values]
    else:
        scores = _cosines(scoring, values)
    if not scoring.ranked:
        return scores
    # The sort keeps the order of equal scores.
    ranked = [{"index": i, "relevance_score": score} for i, score in enumerate(scores)]
    ranked.sort(key=itemgetter("relevance_score"), reverse=True)
    # 0 means all.
    return ranked[: scoring.top or None]


def _cosines(scoring: Scoring, values: Sequence[Any]) -> list[float]:
    """Return the cosine of each pair; ``values`` has the queries' vectors, then the documents'."""
    count = len(scoring.queries)
    vectors = np.asarray(values, np.float64)
    # The minimum avoids a division by zero.
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-8)
    # A cosine is the scalar product of two vectors of length 1. NumPy multiplies a single query
    # with every document.
    cosines: list[float] = (vectors[:count] * vectors[count:]).sum(axis=1).tolist()
    return cosines
