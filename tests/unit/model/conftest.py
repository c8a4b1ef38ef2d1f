"""`triton_vllm.transport` imports what only tritonserver's stub has; here a stand-in takes its place."""

from __future__ import annotations

import pytest

from support import fake_triton

_MODULE = fake_triton.install()


@pytest.fixture
def triton():
    """The stand-in for `triton_python_backend_utils`, with an empty log and nothing unloaded."""
    fake_triton.Logger.lines.clear()
    _MODULE.unloaded.clear()
    return _MODULE
