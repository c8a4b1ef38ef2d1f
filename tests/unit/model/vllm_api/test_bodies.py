"""Errors of a body are counted before vLLM makes an answer of each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from triton_vllm.vllm_api.bodies import BodyType


class Chat:
    """In place of one of pydantic's classes."""

    raises: Exception | None = None

    @classmethod
    def model_validate(cls, body: dict[str, Any]) -> None:
        """Change the body, as some of vLLM's checks do, and raise what it is told to raise."""
        body["messages"] = None
        if cls.raises:
            raise cls.raises


def test_errors_are_counted(monkeypatch):
    """Of the class with the fewest; the body stays as it is."""
    body: dict[str, Any] = {"messages": []}
    kind = BodyType((Chat,), frozenset())
    assert kind.errors(body) == 0
    error: Any = ValueError("wrong")
    for raised, count in ((error, 1), (TypeError("a fault of a check"), 1)):
        monkeypatch.setattr(Chat, "raises", raised)
        assert kind.errors(body) == count
    error.error_count = lambda: 233
    monkeypatch.setattr(Chat, "raises", error)
    assert kind.errors(body) == 233
    fine = SimpleNamespace(model_validate=lambda body: None)
    assert BodyType((Chat, fine), frozenset()).errors(body) == 0
    assert body == {"messages": []}
