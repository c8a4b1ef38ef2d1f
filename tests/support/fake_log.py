"""Stands for `transport.Log` in unit tests of the model: keeps the lines."""

from __future__ import annotations


class FakeLog:
    """Takes log lines of every level; `errors` has those of the last one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.errors: list[str] = []

    def info(self, text: str) -> None:
        self.lines.append(text)

    warning = info

    def error(self, text: str) -> None:
        self.lines.append(text)
        self.errors.append(text)
