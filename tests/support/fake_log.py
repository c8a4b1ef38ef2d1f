"""Stands for `transport.Log` in unit tests of the model: keeps the lines."""

from __future__ import annotations


class FakeLog:
    """Takes log lines: `lines` has all of them, `infos`, `warnings` and `errors` those of a level."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.infos: list[str] = []
        self.warnings: list[str] = []
        self.errors: list[str] = []

    def info(self, text: str) -> None:
        self.lines.append(text)
        self.infos.append(text)

    def warning(self, text: str) -> None:
        self.lines.append(text)
        self.warnings.append(text)

    def error(self, text: str) -> None:
        self.lines.append(text)
        self.errors.append(text)
