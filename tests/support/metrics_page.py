"""Reads a page of Prometheus metrics."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Metrics:
    """The samples of a page: name, labels, value. Time stamps of creation are left out."""

    samples: tuple[tuple[str, dict[str, str], float], ...]

    def names(self, prefix: str) -> set[str]:
        """Return the names that begin so."""
        return {name for name, _, _ in self.samples if name.startswith(prefix)}

    def labels(self, prefix: str) -> list[dict[str, str]]:
        """Return the labels of all samples whose names begin so."""
        return [labels for name, labels, _ in self.samples if name.startswith(prefix)]

    def total(self, name: str) -> float:
        """Return the sum over all labels; 0 where there is none."""
        return sum(value for found, _, value in self.samples if found == name)


def read_metrics(url: str) -> Metrics:
    """Fetch and parse a page."""
    with urllib.request.urlopen(url, timeout=120) as answer:
        lines = answer.read().decode().splitlines()
    found = [match.groups() for match in map(_LINE.match, lines) if match]
    return Metrics(
        tuple(
            (name, dict(_LABEL.findall(labels or "")), float(value))
            for name, labels, value in found
            if not name.endswith("_created")
        )
    )
