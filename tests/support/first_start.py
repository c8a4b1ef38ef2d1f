"""A server whose start is the first with its vLLM cache, its first requests, and the load of its model after an unload."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from support.metrics_page import Metrics, read_metrics
from support.model_control import load, unload
from support.model_requests import STRANGE, ask, ask_all, prompt
from support.open_stream import OpenStream
from support.patience import pause, wait_for
from support.sightings import Sightings
from support.triton_client import get
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from support.open_stream import Event
    from vllm_env.serve.server import TritonServer

PROMPT, _ = FACTS[2]
LONG = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}
TEXTS = [*(text for text, _ in FACTS), *STRANGE]
"""The prompts of a server's first requests."""
FIRST = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
"""The parameters of each."""


@dataclass(frozen=True)
class FirstStart:
    """The server, the variable with its vLLM cache, the processes that its start had, and its metrics after the first load."""

    server: TritonServer
    cache: dict[str, str]
    sightings: Sightings
    metrics: Metrics

    @property
    def page(self) -> str:
        """Its metrics."""
        return metrics_page(self.server)


@dataclass(frozen=True)
class Reloaded:
    """What an unload with a request in flight and the next load showed.

    Attributes:
        whole: the answer to the request that is in flight at the unload, given before.
        parts: the texts that its stream got.
        end: the stream's last event.
        sightings: the processes that the load had.
    """

    whole: str
    parts: tuple[str, ...]
    end: Event
    sightings: Sightings


def metrics_page(server: TritonServer) -> str:
    """Return where a server's metrics are."""
    return f"http://127.0.0.1:{server.ports.metrics}/metrics"


def ask_first(server: TritonServer) -> Metrics:
    """Send a new server its first requests, half of them streamed; return its metrics then."""
    answers = ask_all(server, [prompt(text, FIRST, stream=number % 2 == 0) for number, text in enumerate(TEXTS)])
    assert not [answer.error for answer in answers if answer.error]
    return settled(metrics_page(server))


def settled(url: str) -> Metrics:
    """Return the metrics once all first requests are in them: Triton's and vLLM's servers write them with a delay."""
    wait_for(lambda: read_metrics(url).total("vllm:e2e_request_latency_seconds_count") >= len(TEXTS), "the first requests")
    seen = [read_metrics(url)]

    def stands_still() -> bool:
        pause(4)  # the model waits up to two seconds from one update to the next
        seen.append(read_metrics(url))
        return _of_vllm(seen[-1]) == _of_vllm(seen[-2])

    wait_for(stands_still, "metrics that stand still")
    return seen[-1]


def _of_vllm(page: Metrics) -> list[object]:
    return [sample for sample in page.samples if sample[0].startswith("vllm:")]


def reload(start: FirstStart) -> Reloaded:
    """Unload the model while it answers; when it and its metrics are gone, load it with no temporary files from before."""
    server = start.server
    whole = ask(server, PROMPT, LONG).text
    wait_for(lambda: read_metrics(start.page).total("vllm:generation_tokens_total") > 0, "vLLM's metrics")
    with OpenStream(server.grpc_url, prompt(PROMPT, LONG, stream=True)) as running:
        running.wait(1)
        assert unload(server)[0] == 200
        end = running.wait_end()
    wait_for(lambda: get(server.http_url, "/v2/models/vllm/ready")[0] != 200, "the model's end")
    wait_for(lambda: not read_metrics(start.page).names("vllm:"), "the end of vLLM's metrics")
    wait_for(lambda: [one.pid for one in server.members()] == [server.pid], "the end of the model's processes")
    assert server._scratch is not None
    for path in server._scratch.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    later = Sightings(start.cache)
    with later.watching():
        status, reason = load(server)
        assert status == 200, reason
    return Reloaded(whole, tuple(event.text for event in running.events), end, later)
