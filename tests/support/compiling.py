"""A logits processor that compiles C++ for two minutes; runs in EngineCore."""

from __future__ import annotations

import subprocess
import time

from vllm.v1.sample.logits_processor import LogitsProcessor

SECONDS = 120
SEED = 7  # of the request that it compiles for
SOURCE = b'#include <regex>\nstd::regex any(".*");\n'  # takes 5 s of the processor


class Compiling(LogitsProcessor):
    """Changes no logits."""

    def __init__(self, *_):
        """Take no notice of vLLM's configuration."""

    def is_argmax_invariant(self):
        """Say that the most probable token stays the same."""
        return True

    def apply(self, logits):
        """Return the same logits."""
        return logits

    def update_state(self, update):
        """Compile again and again if the request with ``SEED`` has come."""
        if not any(added[1].seed == SEED for added in (update.added if update else [])):
            return
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            subprocess.run(["c++", "-O2", "-x", "c++", "-c", "-o", "/dev/null", "-"], input=SOURCE, check=True)
