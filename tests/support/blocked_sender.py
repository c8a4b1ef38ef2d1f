"""A stand-in for Triton's response sender: the responses of some requests are never taken.

Triton 24.10 can do so when a gRPC client is killed, but not each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.settings import with_line

if TYPE_CHECKING:
    from pathlib import Path

BLOCKED = "never taken"
"""The prompt of a request whose responses are never taken."""
_CODE = """
import threading
from triton_vllm.base import triton

_init = triton.Channel.__init__

class Blocked:
    def __init__(self, sender):
        self.is_cancelled = sender.is_cancelled

    def send(self, *_, **__):
        threading.Event().wait()

def init(self, request, *args, **options):
    _init(self, request, *args, **options)
    if triton.inputs(request)["text_input"].item(0) == b"BLOCKED":
        self._sender = Blocked(self._sender)

triton.Channel.__init__ = init
"""


def with_blocked_sender(model: Path) -> None:
    """Change a copied model before it is served."""
    (model / "1" / "blocked_sender.py").write_text(_CODE.replace("BLOCKED", BLOCKED), encoding="utf-8")
    with_line(model, "import blocked_sender", after="from triton_vllm.request import contract")
