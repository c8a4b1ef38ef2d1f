"""Shapes of what crosses modules here and is made elsewhere."""

from __future__ import annotations

from typing import Protocol


class Log(Protocol):
    """Where it is said what happens; `transport.Log` in the server."""

    def info(self, text: str) -> None:
        """Log what happens in normal running."""

    def warning(self, text: str) -> None:
        """Log what an operator should look at."""

    def error(self, text: str) -> None:
        """Log what has failed."""
