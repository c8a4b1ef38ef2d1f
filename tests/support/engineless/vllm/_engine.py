"""An AsyncLLM without EngineCore: it answers from a table in the event loop that it was started in, one word a token.

As in vLLM, for tests of the server read or use it: outputs of each kind, `n`, log probabilities, a queue before
`max_num_seqs`, aborts, and the metrics of running, waiting and made tokens. Each of several front ends answers by itself.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from prometheus_client import Counter, Gauge
from vllm import _names

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

FACTS: dict[str, str] = dict(json.loads(Path(__file__).with_name("_facts.json").read_text(encoding="utf-8")))
VOCABULARY = 512
USUAL_TOKENS = 16  # of vLLM's SamplingParams
LONG = 1000
"""From so many tokens on an answer takes its time, so that a test can meet it in the middle: 60,000 take five minutes."""
PACE_S = 0.005
_TOKEN = re.compile(r"\s*\S+")
_LABELS = ("model_name", "engine")
# Once in a process, whatever is started in it: a registry has a name once.
_MADE = Counter("vllm:generation_tokens", "Number of generation tokens processed.", _LABELS)
_READ = Counter("vllm:prompt_tokens", "Number of prefill tokens processed.", _LABELS)
_RUNNING = Gauge("vllm:num_requests_running", "Number of requests in model execution batches.", _LABELS)
_WAITING = Gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", _LABELS)


@dataclass
class AsyncEngineArgs(_names.AsyncEngineArgs):
    """Engine arguments that tests and the adapter give."""

    dtype: str = "auto"
    enforce_eager: bool = False
    kv_cache_memory_bytes: int = 0
    gpu_memory_utilization: float = 0.9
    max_model_len: int = 2048
    max_num_seqs: int = 256
    worker_extension_cls: str = ""
    enable_log_requests: bool = False
    _api_process_count: ClassVar[int] = 1
    _api_process_rank: ClassVar[int] = 0

    def create_engine_config(self, usage_context: Any) -> AsyncEngineArgs:
        """Return what an engine is started with."""
        return self


@dataclass
class Addresses:
    """Where front ends and engine would meet."""

    inputs: list[str] = field(default_factory=lambda: ["ipc://none"])
    outputs: list[str] = field(default_factory=lambda: ["ipc://none"])
    frontend_stats_publish_address: str | None = None


@contextmanager
def launch_core_engines(addresses: Addresses) -> Iterator[None]:
    """Launch nothing: each front end answers by itself."""
    yield


@dataclass(frozen=True)
class Logprob:
    """The log probability of a token."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class Answer:
    """What a request is answered: its tokens' texts, and why it ends."""

    tokens: list[str]
    reason: str


class AsyncLLM:
    """The engine."""

    def __init__(self, args: AsyncEngineArgs) -> None:
        self.errored = False
        self.model_config = SimpleNamespace(
            model=args.model,
            max_model_len=args.max_model_len,
            is_multimodal_model=False,
            get_vocab_size=lambda: VOCABULARY,
            get_diff_sampling_param=dict,
            generation_config="auto",
            override_generation_config={},
        )
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=args.max_num_seqs))
        self._places = asyncio.Semaphore(args.max_num_seqs)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._labels = {"model_name": args.model, "engine": "0"}
        self._counts = not args.disable_log_stats
        self._logs = args.enable_log_requests

    @classmethod
    def from_engine_args(cls, args: AsyncEngineArgs, usage_context: Any) -> AsyncLLM:
        """Start; wait for the gate, if there is one."""
        gate = os.environ.get("ENGINELESS_GATE")
        while gate and not Path(gate).exists():
            time.sleep(0.05)
        return cls(args)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: AsyncEngineArgs,
        usage_context: Any,
        *,
        enable_log_requests: bool,
        disable_log_stats: bool,
        client_addresses: dict[str, str] | None,
        client_count: int,
        client_index: int,
    ) -> AsyncLLM:
        """Start one of several front ends."""
        if client_addresses is None:
            client = importlib.import_module("vllm.v1.engine.core_client")  # where the adapter replaces it
            with client.launch_core_engines(addresses=Addresses()):
                pass
        return cls.from_engine_args(vllm_config, usage_context)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return what the model can do."""
        return ("generate",)

    async def check_health(self) -> None:
        """Raise nothing: this engine does not die by itself."""

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps, which this one does not."""
        return False

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, lora_request: Any = None, priority: int = 0
    ) -> _names.Collector:
        """Begin a request."""
        text = prompt.get("prompt") or ""
        ids = prompt.get("prompt_token_ids") or list(range(len(_TOKEN.findall(text))))
        room = self.model_config.max_model_len - len(ids)
        if room < 1:
            raise ValueError(f"The prompt has {len(ids)} tokens, which is the model's maximum length or more.")
        if self._logs:
            print(f"Added request {request_id}.", flush=True)
        collector = _names.Collector()
        work = self._work(collector, ids, _answer(text, params, room), params)
        task = self._tasks[request_id] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))
        return collector

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        """Add a request and return its outputs."""
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        collector = await self.add_request(request_id, prompt, sampling_params)
        collector.put = outputs.put_nowait
        finished = False
        while not finished:
            item = await outputs.get()
            finished = item.finished
            yield item

    async def abort(self, request_id: str) -> None:
        """Stop a request; one that is unknown is ignored."""
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    def shutdown(self) -> None:
        """End all work."""
        self.errored = True
        for task in self._tasks.values():
            task.cancel()

    async def _work(self, collector: _names.Collector, ids: list[int], answer: Answer, params: Any) -> None:
        with _WAITING.labels(**self._labels).track_inprogress():
            await self._places.acquire()
        try:
            with _RUNNING.labels(**self._labels).track_inprogress():
                self._count(_READ, len(ids))
                await self._generate(collector, ids, answer, params)
        finally:
            self._places.release()

    async def _generate(self, collector: _names.Collector, ids: list[int], answer: Answer, params: Any) -> None:
        streams = params.output_kind is _names.RequestOutputKind.DELTA
        pace = PACE_S if len(answer.tokens) > LONG else 0
        for number in range(1, len(answer.tokens) + 1):
            await asyncio.sleep(pace)
            self._count(_MADE, params.n)
            last = number == len(answer.tokens)
            if streams:
                for index in range(params.n):
                    part = _part(index, answer, slice(number - 1, number), params)
                    collector.put(_output([part], ids, finished=last and index == params.n - 1))
            elif last:
                collector.put(_output([_part(i, answer, slice(number), params) for i in range(params.n)], ids, finished=True))

    def _count(self, counter: Counter, amount: int) -> None:
        if self._counts:
            counter.labels(**self._labels).inc(amount)


def _answer(text: str, params: Any, room: int) -> Answer:
    """Return the table's answer; to another prompt its own words, again and again up to the limit, as with `ignore_eos`."""
    words = _TOKEN.findall(FACTS.get(text, text)) or ["?"]
    asked = getattr(params, "max_tokens", USUAL_TOKENS)
    most = room if asked is None else min(asked, room)
    ends = text in FACTS and not getattr(params, "ignore_eos", False) and len(words) <= most
    return Answer(words, "stop") if ends else Answer(list(islice(cycle(words), most)), "length")


def _part(index: int, answer: Answer, part: slice, params: Any) -> SimpleNamespace:
    tokens = answer.tokens[part]
    count = getattr(params, "logprobs", None)
    end = part.stop
    return SimpleNamespace(
        index=index,
        text="".join(tokens),
        token_ids=[len(token) for token in tokens],
        logprobs=None if count is None else [_logprobs(token, max(count, 1)) for token in tokens],
        cumulative_logprob=None if count is None else -0.1 * end,
        finish_reason=answer.reason if end == len(answer.tokens) else None,
        stop_reason=None,
    )


def _logprobs(token: str, count: int) -> dict[int, Logprob]:
    return {len(token) + place: Logprob(-0.1 * (place + 1), place + 1, token) for place in range(count)}


def _output(parts: list[SimpleNamespace], ids: list[int], *, finished: bool) -> SimpleNamespace:
    return SimpleNamespace(outputs=parts, finished=finished, prompt_token_ids=ids, prompt_logprobs=None, num_cached_tokens=0)
