"""A console that remembers what the user would see change while a stage runs."""

from __future__ import annotations

from vllm_env.base.report import Console


class Listener(Console):
    """Prints nothing; ``heard`` has the text of each step."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.heard: list[str] = []

    def step(self, text: str, fraction: float | None = None) -> None:
        """Remember the text."""
        self.heard.append(text)
