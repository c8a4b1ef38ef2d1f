"""The benchmarks' own modules, which are no package of the checkout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.repositories import CHECKOUT

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(CHECKOUT / "benchmarks")
    return
