"""The folders of a store's adapters."""

from __future__ import annotations

import pytest

from support.adapters import Folders


@pytest.fixture
def folders(tmp_path):
    made = Folders(tmp_path)
    yield made
    made.store.close()
    assert not made.copies._folder.exists()
