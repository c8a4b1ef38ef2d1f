"""Refuse constraints that no answer can follow, or that cost too much to compile.

Each is tried with limits of time and memory before vLLM gets it.

The size of a constraint does not show how long xgrammar takes. ``.?`` 64 times takes more than four
processor seconds. ``a?`` 64 times takes 0.2 s, and ``a{0,10000}`` almost none (xgrammar 0.2.8,
32,000 tokens).

vLLM reads a constraint in the event loop. It compiles it in the one or few threads of EngineCore
that all constraints share. It sets no limit of time. If EngineCore cannot compile it, the request
ends without a reason, and the log gets a traceback.

With the backend "auto", vLLM passes what xgrammar cannot read to EngineCore for guidance. But
EngineCore keeps the compiler of its first constraint, which is nearly always xgrammar. So what
xgrammar refuses is refused here, whatever came first. The exception is a Lark grammar for Mistral's
tokenizer, which vLLM always gives to guidance.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from triton_vllm import vllm_api
from triton_vllm.base.errors import InvalidRequestError, UnavailableError
from triton_vllm.constraints.trial_process import DONE_PREFIX

if TYPE_CHECKING:
    from triton_vllm.base.protocols import EngineClient
    from triton_vllm.constraints.checks import Constraint

READ_S = 0.25
"""The most processor seconds for reading a constraint, which vLLM does in the event loop."""
MEMORY_BYTES = 1 << 29
"""The most bytes that compiling may take."""
# One that takes long does not keep the others waiting.
TRIALS_AT_ONCE = 2
"""How many constraints are tried at the same time."""
# On a busy machine, a processor second takes several seconds.
ANSWER_S = 60.0
"""How many seconds of the clock to wait for an answer."""
# The worker takes 300 MB, with CUDA 590 MB, because xgrammar imports torch.
WORKER_IDLE_S = 300.0
"""After how many seconds without a constraint the worker ends."""
# Most requests of a service have the same few schemas.
REMEMBERED_CONSTRAINTS = 1024
"""How many constraints that passed are remembered, so that they are not tried again."""
SCRIPT = Path(__file__).with_name("trial_process.py")
# The worker forks, so it should have one thread. It needs no GPU.
WORKER_VARIABLES = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
WORKER_ENDS_S = 10.0
"""After how many seconds a worker is killed if it does not end on request."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """What a trial has shown about a constraint.

    Attributes:
        exceeds_limits: whether compiling it takes too long or too much memory.
        refusal: why xgrammar cannot use it. None if it can.
    """

    exceeds_limits: bool = False
    refusal: str | None = None


class Trials:
    """Tries constraints in a worker process.

    The first constraint starts the worker and waits a second or two for it. The worker ends after
    some idle minutes, and with this process.
    """

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(TRIALS_AT_ONCE)
        self._worker: Worker | None = None
        # held while the worker is looked for or started
        self._starting = asyncio.Lock()
        # Whether there can be a worker on this machine, as far as is known.
        self._possible = True
        # Whether a worker has started once.
        self._has_worked = False
        # How many constraints are being tried now.
        self._under_way = 0
        # Ends the worker after its idle time.
        self._ending: asyncio.TimerHandle | None = None
        # The constraints that passed, the oldest first. Only the keys count.
        self._passed: OrderedDict[Constraint, None] = OrderedDict()

    async def check(self, llm: EngineClient, constraint: Constraint) -> None:
        """Return if vLLM may compile a constraint.

        Raises:
            InvalidRequestError: xgrammar refuses it, or no answer fits it, or compiling takes too
                long or too much memory.
            UnavailableError: the machine is too busy to find out, or the worker has been killed.
        """
        if constraint in self._passed or not vllm_api.compiles_with_xgrammar(llm):
            return
        await self._slots.acquire()
        self._keep_worker()
        attempt = asyncio.ensure_future(self._attempt(llm, constraint))
        # A request that is cancelled does not stop its worker, which then still needs the slot.
        # Clients that leave would otherwise have any number of constraints tried at once.
        attempt.add_done_callback(self._finish)
        verdict = await asyncio.shield(attempt)
        where = f"structured_outputs.{constraint.name}"
        if verdict.exceeds_limits:
            raise InvalidRequestError(
                f"{where} takes more than {constraint.seconds} s or "
                f"{MEMORY_BYTES >> 20} MB to compile: make it smaller, "
                "with fewer optional or nested parts"
            )
        if verdict.refusal and not await self._goes_to_guidance(llm, constraint):
            # The server's log would otherwise not show why such requests fail.
            _log.warning("%s %s", where, verdict.refusal)
            raise InvalidRequestError(f"{where} {verdict.refusal}")
        self._passed[constraint] = None
        if len(self._passed) > REMEMBERED_CONSTRAINTS:
            self._passed.popitem(last=False)

    async def _goes_to_guidance(self, llm: EngineClient, constraint: Constraint) -> bool:
        """Return whether vLLM uses guidance for this constraint, even if xgrammar could read it."""
        return constraint.kind == "lark" and await vllm_api.has_tekken(llm)

    async def _attempt(self, llm: EngineClient, constraint: Constraint) -> Verdict:
        """Have the worker try a constraint; start the worker if there is none.

        Raises:
            UnavailableError: the worker could not be started, or gave no answer in time.
        """
        worker = await self._running(llm)
        # No constraint can be tried on this machine, so vLLM compiles them untried.
        if worker is None:
            return Verdict()
        try:
            return await asyncio.to_thread(worker.attempt, constraint)
        except OSError:
            # The next request starts a new worker.
            self._end_worker()
            raise UnavailableError(
                f"structured_outputs.{constraint.name} could not be compiled in time: try again"
            ) from None

    def _keep_worker(self) -> None:
        """Count a trial; the worker does not end before its last one."""
        self._under_way += 1
        if self._ending is not None:
            self._ending.cancel()

    def _finish(self, attempt: asyncio.Future[Verdict]) -> None:
        """Free the slot of an attempt that is done; after the last one, end the worker later."""
        # If its request was cancelled, nothing else reads the exception.
        if not attempt.cancelled():
            attempt.exception()
        self._slots.release()
        self._under_way -= 1
        if not self._under_way:
            self._ending = asyncio.get_running_loop().call_later(WORKER_IDLE_S, self._end_worker)

    def _end_worker(self) -> None:
        worker = self._worker
        self._worker = None
        if worker is not None:
            # It may take seconds, so the event loop does not wait for it.
            asyncio.get_running_loop().run_in_executor(None, worker.end)

    async def _running(self, llm: EngineClient) -> Worker | None:
        # One constraint starts the worker. The others wait for it.
        async with self._starting:
            if self._worker is None and self._possible:
                self._worker = await self._start_worker(llm)
            return self._worker

    async def _start_worker(self, llm: EngineClient) -> Worker | None:
        """Return a new worker. None if there can be no worker on this machine.

        Raises:
            UnavailableError: it could not be started now, but may be later.
        """
        try:
            serialize = await vllm_api.xgrammar_tokenizer(llm)
            # Both calls block: the tokenizer is serialized, and the worker reads it.
            worker = await asyncio.to_thread(lambda: Worker(serialize()))
        except OSError:
            raise UnavailableError(
                "structured_outputs could not be tried, the machine is too busy: try again"
            ) from None
        except Exception as error:
            # The cause is an older xgrammar, or a tokenizer that it does not know. If a worker has
            # run before, it is neither.
            if self._has_worked:
                raise UnavailableError(
                    "structured_outputs could not be tried: try again"
                ) from error
            self._possible = False
            _log.warning("Constraints are not tried before vLLM compiles them", exc_info=True)
            return None
        self._has_worked = True
        return worker


class Worker:
    """The process of ``trial_process.py``; its methods block.

    Args:
        tokenizer: the tokenizer as xgrammar has serialized it.

    Raises:
        OSError: the process could not be started in time, or was killed.
        RuntimeError: the process cannot read the tokenizer.
    """

    def __init__(self, tokenizer: str) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-I", str(SCRIPT)]
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), env={**os.environ, **WORKER_VARIABLES}
            )
        try:
            # It answers when it has read the tokenizer.
            ready = self._ask(tokenizer) is not None
        except TimeoutError:
            # The worker may now end with a traceback. That would say nothing about the tokenizer.
            self.end()
            raise
        except OSError:
            ready = False
        if not ready:
            self.end()
            # A positive code means that the worker has ended by itself, with a traceback. A signal
            # gives a negative one.
            if self._process.returncode > 0:
                raise RuntimeError("xgrammar's worker cannot read the tokenizer")
            raise ConnectionError("xgrammar's worker was killed")

    def attempt(self, constraint: Constraint) -> Verdict:
        """Try a constraint.

        Raises:
            OSError: the worker has ended, or the machine is very busy.
        """
        task = {
            "kind": constraint.kind,
            "text": constraint.text,
            "bytes": MEMORY_BYTES,
            "read_s": READ_S,
            "compile_s": constraint.seconds,
        }
        answer = self._ask(json.dumps(task))
        # The kernel has ended the process, because it has exceeded the limits.
        if answer is None:
            return Verdict(exceeds_limits=True)
        # An empty answer means that xgrammar can use the constraint.
        return Verdict(refusal=answer or None)

    def end(self) -> None:
        """End the process.

        A constraint that is being tried is still answered: it has its own process.
        """
        # Closing is not enough, because a forked EngineCore has a copy of the socket. The error
        # means that the process has already ended.
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(WORKER_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, text: str) -> str | None:
        """Return what the worker, or its fork for a constraint, has answered.

        Return None if it has ended without an answer.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
            ours.settimeout(ANSWER_S)
            ours.sendall(text.encode())
            ours.shutdown(socket.SHUT_WR)
            with ours.makefile("rb") as stream:
                answer = stream.read()
        return answer.removeprefix(DONE_PREFIX).decode() if answer.startswith(DONE_PREFIX) else None
