"""Scores of pairs from a model's numbers."""

from __future__ import annotations

import pytest

from triton_vllm.pooling.scores import Scoring, answer


def test_vectors_are_compared_by_their_directions():
    """One query is compared with every document; a text without a direction is like none."""
    scoring = Scoring(("query",), ("same", "other", "nothing", "opposite"))
    scores = answer(scoring, [[3.0, 4.0], [6.0, 8.0], [4.0, -3.0], [0.0, 0.0], [-3.0, -4.0]])
    assert scores == pytest.approx([1, 0, 0, -1])


def test_ranked_scores_are_the_best_ones_first():
    """With the number of each document; equal ones keep their order."""
    scoring = Scoring(("query",), ("a", "b", "c"), ranked=True, top=2)
    best = [{"index": 1, "relevance_score": 0.5}, {"index": 2, "relevance_score": 0.5}]
    assert answer(scoring, [[0.25], [0.5], [0.5]]) == best
