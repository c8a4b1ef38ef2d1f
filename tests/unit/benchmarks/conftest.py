"""The benchmarks' own modules, which are no package of the checkout."""

from __future__ import annotations

import pytest

from support.repositories import CHECKOUT


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CHECKOUT / "benchmarks")
