"""Models of several instances, which of them vLLM was asked by, and the memory that these share."""

from __future__ import annotations

import mmap
import re
from typing import TYPE_CHECKING, Any

from support.model_requests import ask_all
from support.open_stream import OpenStream
from support.patience import wait_for

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    from support.model_requests import Answer
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


def answers_of_all(server: TritonServer, requests: list[dict[str, Any]], count: int) -> list[Answer]:
    """Send requests, and again until each of ``count`` instances has got some; return all answers."""
    start = len(said(server))
    answers: list[Answer] = []

    def ask_again() -> bool:
        answers.extend(ask_all(server, requests))
        return len(instances_asked(server, start)) == count

    wait_for(ask_again, "a request of each instance")
    return answers


def opened_in_all(server: TritonServer, stack: ExitStack, requests: list[dict[str, Any]], count: int) -> list[OpenStream]:
    """Open a stream for each request, and more until each of ``count`` instances has got some; vLLM has all of them."""
    start = len(said(server))
    streams: list[OpenStream] = []

    def open_some(more: list[dict[str, Any]]) -> None:
        streams.extend(stack.enter_context(OpenStream(server.grpc_url, one)) for one in more)
        wait_for(lambda: said(server, start).count("Added request triton-") == len(streams), "all requests in vLLM")

    open_some(requests)
    while len(instances_asked(server, start)) < count:
        assert len(streams) < 3 * len(requests), f"too few of {count} instances got requests"
        open_some(requests[:1])
    return streams


def mappings(path: Path, size: int, count: int) -> list[mmap.mmap]:
    """Return ``count`` mappings of one new file of ``size`` bytes, each as a process of its own has it."""
    path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        return [mmap.mmap(file.fileno(), size) for _ in range(count)]
