"""Models of several instances, which of them vLLM was asked by, and the memory that these share."""

from __future__ import annotations

import mmap
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_env.serve.server import TritonServer


def with_instances(model: Path, count: int) -> None:
    """Set the count of the one instance group in a model's config.pbtxt."""
    config = model / "config.pbtxt"
    changed, found = re.subn(r"(instance_group\s*\[\s*\{\s*count:\s*)\d+", rf"\g<1>{count}", config.read_text(encoding="utf-8"))
    assert found == 1
    config.write_text(changed, encoding="utf-8")


def said(server: TritonServer, since: int = 0) -> str:
    """Return the server's log from an offset on."""
    return server.log.read_text(errors="replace")[since:]


def instances_asked(server: TritonServer, since: int = 0) -> set[str]:
    """Return the process ids in the names of the requests that vLLM has logged (``enable_log_requests``)."""
    return set(re.findall(r"Added request triton-(\d+)-", said(server, since)))


def mappings(path: Path, size: int, count: int) -> list[mmap.mmap]:
    """Return ``count`` mappings of one new file of ``size`` bytes, each as a process of its own has it."""
    path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        return [mmap.mmap(file.fileno(), size) for _ in range(count)]
