"""Start vLLM's engine, watch it, start it again when it dies, and end it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
from typing import TYPE_CHECKING

from triton_vllm import vllm_api
from triton_vllm.base.errors import NOT_TAKEN, UNLOADING, StoppedError, UnavailableError
from triton_vllm.engine import spare_memory
from triton_vllm.engine.fit import Fit
from triton_vllm.engine.gate import Gate
from triton_vllm.engine.jobs import Jobs
from triton_vllm.engine.loop import LoopThread
from triton_vllm.engine.outcome import Translator
from triton_vllm.engine.patience import Patience
from triton_vllm.engine.processes import Processes
from triton_vllm.engine.runner import Runner
from triton_vllm.instances.source import Loss
from triton_vllm.operator.run import Operator

if TYPE_CHECKING:
    from collections.abc import Callable

    from triton_vllm.base.limits import Limits
    from triton_vllm.base.protocols import EngineClient, Log
    from triton_vllm.engine.front import Front
    from triton_vllm.engine.pace import Pace
    from triton_vllm.engine.prompts import Prompter
    from triton_vllm.instances.source import Source
    from triton_vllm.lora.store import AdapterStore


# If the engine hangs, all requests are stuck.
_SHOWN = 20
"""The most stuck requests in a line of the log."""
# A response that is not taken then is the second one: the send watch has looked again.
LAST_WORDS_S = 10.0
"""From the moment at which an engine is given up to the end of this process, s, to send errors."""
UNLOADED = "the model was unloaded before the request had finished"


class Engine:
    """vLLM's engine, in an event loop on its own thread.

    Public methods are called from other threads, except for ``give_up``.

    Args:
        vllm: the loaded vLLM.
        source: starts the engine, or connects to it.
        prompter: makes prompts from requests.
        store: the LoRA adapters, if the model has any.
        log: logs events.
        limits: how long a request may take and wait.
        pace: when the engine is checked and started again.
        when_started: called each time an engine has started, also after a loss.
        end_process: ends this process with a status.

    Attributes:
        jobs: what vLLM works on.
        runner: takes Triton's requests.
        prompter: makes prompts from requests.
        facts: what the model can do and take. They stay the same when the engine is started again.
    """

    def __init__(  # noqa: PLR0913 - each is another part of the model
        self,
        vllm: vllm_api.Vllm,
        source: Source,
        prompter: Prompter,
        store: AdapterStore | None = None,
        *,
        log: Log,
        limits: Limits,
        pace: Pace,
        when_started: Callable[[], None] = lambda: None,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._source = source
        self.prompter = prompter
        self._log = log
        self._limits = limits
        self._pace = pace
        self._when_started = when_started
        self._end_process = end_process
        self._silence = pace.silence or vllm.step_timeout_s
        self._patience = Patience(self._silence, pace.idle)
        self._translator = Translator(vllm, log)
        self._thread = LoopThread(self._translator.log_error, log)
        self._loop = self._thread.loop
        # Set by ``_load``. It stays when the engine has died, unlike ``jobs.llm``.
        self._llm: EngineClient
        self._processes = Processes()
        # Set when the engine is to end for good.
        self._ending = threading.Event()
        # The API on the OpenAI port, if ``attach`` has been called.
        self._front: Front | None = None
        # When EngineCore last answered a question, in the event loop's time.
        self._answered_at = 0.0
        # How long EngineCore has not answered, s. 0 if it does not hang.
        self._hung_for = 0.0
        self._spare_memory = spare_memory.SpareMemory()
        self.jobs = Jobs(self._loop, self._translator, limits, source.counts, log)
        operator = Operator(self.jobs.ledger.count_of_all, source.sleep_state, store, log)
        self.runner = Runner(self.jobs, prompter, self._translator, limits, operator, store)
        self.facts = vllm_api.Facts()

    def start(self) -> None:
        """Start the loop and load the model; return when requests can be taken.

        Raises:
            Exception: vLLM's own exception.
        """
        self._thread.start()
        try:
            self._thread.run(self._load())
        except BaseException:
            self._thread.end()
            raise
        self._loop.call_soon_threadsafe(self._check)

    def fit(self, when_dead: Callable[[], None] | None) -> Fit:
        """Return the checks in front of this engine, with its gate.

        Args:
            when_dead: called for each request that finds the engine dead.
        """
        gate = Gate(self.jobs, self.runner.operator, self._limits, when_dead)
        return Fit(self.facts, self._limits, gate)

    def parsers(self, names: vllm_api.ParserNames) -> vllm_api.Parsers:
        """Return the parsers with these names for the engine's model.

        Raises:
            ParserError: the parsers do not fit the model.
        """
        return vllm_api.Parsers(self._llm, names)

    def log_error(self, what: str, error: Exception) -> None:
        """Log an exception; the first one from a place in the code is logged with its traceback."""
        self._translator.log_error(what, error)

    def attach(self, front: Front) -> None:
        """Let another API serve from now on.

        Raises:
            Exception: it cannot; the engine still runs.
        """
        self._front = front
        self._thread.run(front.use(self._llm, self.facts.tasks))

    def leave(self, grace_s: float) -> None:
        """Begin to end, because the server is stopping; ``stop`` follows after the last response.

        After ``grace_s`` seconds the requests in flight are cancelled, and vLLM is shut down.
        """
        self._loop.call_soon_threadsafe(self._loop.call_later, grace_s, self._keep_refusing)
        # Triton itself takes no more requests.
        if self._front is not None:
            self._loop.call_soon_threadsafe(self._front.leave)

    def stop(self, grace_s: float) -> None:
        """Let requests finish within ``grace_s`` seconds, cancel the rest and shut vLLM down.

        A second call does nothing.
        """
        if self._loop.is_closed():
            return
        self._ending.set()
        # A failure here must not keep the thread from ending.
        with contextlib.suppress(Exception):
            self._thread.run(self._drain(grace_s))
        self._thread.end()

    async def _load(self) -> None:
        """Start or join an engine, and run requests in it; also after the loss of another one.

        Raises:
            Exception: vLLM's own exception.
        """
        # Another API answers meanwhile, and says that there is no engine.
        with self._processes.noting():
            self._llm = await self._source.start(in_thread=self._front is not None)
        self.facts = vllm_api.facts(self._llm, await self._llm.get_supported_tasks())
        # A model that only pools has no token to sample. For other instances this has been done,
        # and the engine may sleep already.
        if "generate" in self.facts.tasks and self._source.leads:
            await self.prompter.start(self._llm)
        self._hung_for = 0.0
        self._answered_at = self._loop.time()
        if self._front is not None:
            await self._front.use(self._llm, self.facts.tasks)
        # The engine may have been given up during these waits, and must not serve again.
        if self._ending.is_set():
            self._llm.shutdown()
            return
        self._when_started()
        # Tells the other instances that the engine serves.
        self._source.share()
        self.runner.use(self._llm, self.facts)

    def _check(self) -> None:
        """Check the engine and the requests in flight; this calls itself again after each period.

        While a lost engine is started again, there are no checks.
        """
        if self._ending.is_set():
            return
        try:
            if self.jobs.llm is not None:
                # Without this, an engine that died while idle would be noticed only by the next
                # request, which would fail.
                loss = self._loss()
                if loss is None:
                    self._ask_now_and_then()
                elif loss.for_good:
                    self.give_up(loss.what)
                    return
                else:
                    self._bury(loss)
                    if self._pace.restart:
                        # It begins the checks again when the engine runs.
                        self._loop.create_task(self._revive())
                        return
            self.jobs.refuse_overdue()
            self.jobs.ledger.tidy()
            self._note_stuck()
            if self._spare_memory.is_due(self.jobs.ledger.count(), self._loop.time()):
                # vLLM keeps the tokens' texts, which lie between what the requests have freed.
                vllm_api.forget_texts()
                self._loop.run_in_executor(None, spare_memory.give_back)
        except Exception as error:  # noqa: BLE001 - the next check may find more
            self._translator.log_error("the engine could not be checked", error)
        self._loop.call_later(self._pace.health_period, self._check)

    def _loss(self) -> Loss | None:
        """Return why the engine must be abandoned, or None."""
        if self._hung_for:
            return Loss(f"does not answer for {self._hung_for:.0f} s")
        # Without a restart, only new requests are refused. Those in flight may still finish.
        if self.jobs.unhealthy and self._pace.restart:
            return Loss("has failed vLLM's health check")
        return self._source.loss() or (Loss("has died") if vllm_api.is_dead(self._llm) else None)

    def _bury(self, loss: Loss) -> None:
        """End the requests of a lost engine, tell the other instances, and log the loss."""
        self.runner.lose()
        self._source.retire(hung=bool(self._hung_for))
        if loss.in_order:
            self._log.info(f"the engine {loss.what}")
            return
        what_next = ", starting it again" if self._pace.restart else ""
        self._log.error(f"the engine {loss.what}{what_next}")

    def _ask_now_and_then(self) -> None:
        """Ask EngineCore a question from time to time while requests are open."""
        is_due = self._loop.time() - self._answered_at > self._pace.question_period
        if is_due and not self.jobs.ledger.is_empty():
            # Infinity until the answer comes: one question at a time.
            self._answered_at = math.inf
            self._loop.create_task(self._ask())

    async def _ask(self) -> None:
        """Ask EngineCore a question; set ``_hung_for`` if it does not answer for too long."""
        # vLLM takes a hanging EngineCore for healthy, and its requests would wait for ever.
        # EngineCore answers between two steps of the model, so an answer may take as long as a step
        # may.
        llm = self._llm
        try:
            question = llm.is_sleeping()
            silence = await self._patience.wait_for_answer(
                question, lambda: self.jobs.last_output_at
            )
            # A lost engine's answer says nothing about the new one.
            if llm is self._llm:
                self._hung_for = silence
        except Exception as error:  # noqa: BLE001 - is_dead finds a dead engine
            if not vllm_api.is_dead(llm):
                self._translator.log_error("the engine could not be asked", error)
        finally:
            self._answered_at = self._loop.time()

    def _note_stuck(self) -> None:
        """Log the requests that have had no output for long, with their state."""
        # A long whole answer is among them: it has only one output. So they are only logged.
        stuck = self.jobs.ledger.stuck(self._loop.time() - self._silence)
        if not stuck:
            return
        states = "; ".join(job.state() for job in stuck[:_SHOWN])
        self._log.warning(
            f"{len(stuck)} requests have had no output for {self._silence:.0f} s: {states}"
        )

    async def _revive(self) -> None:
        """Try to start the engine until it runs."""
        delays = self._pace.backoff
        attempt = 0
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                # When an engine has died, its workers may still hold the devices' memory.
                if self._front is None:
                    self._llm.shutdown()
                else:
                    # In a thread: the other API refuses requests meanwhile, in this loop.
                    await asyncio.to_thread(self._llm.shutdown)
                await asyncio.to_thread(self._processes.end)
                # The engine may have been given up during these waits.
                if self._ending.is_set():
                    return
                await self._load()
            except Exception as error:  # noqa: BLE001 - e.g. out of memory, until it is freed
                delay = delays[min(attempt, len(delays) - 1)]
                attempt += 1
                self._log.error(
                    f"restart {attempt} failed, next one in {delay:.0f} s: "
                    f"{type(error).__name__}: {error}"
                )
                await asyncio.sleep(delay)
            else:
                if not self._ending.is_set():
                    self._log.info(f"the engine is back after {time.monotonic() - began:.1f} s")
                self._check()
                return

    def _keep_refusing(self) -> None:
        """Cancel the requests in flight, and again after each period; end the engine once idle."""
        # Triton unloads the model only after its clients: 24.10 waits for ever for a gRPC stream
        # that its client keeps open, or does not read. The devices' memory should not wait as well.
        # Other instances may still need an engine that they share.
        is_idle = self._source.alone and self.jobs.ledger.is_empty()
        if is_idle and not self._ending.is_set():
            self._end_early(UNLOADING, StoppedError)
        # More requests may arrive until the server unloads the model.
        self.jobs.refuse_all(UNLOADED)
        self._loop.call_later(self._pace.health_period, self._keep_refusing)

    def give_up(self, reason: str) -> None:
        """End the engine and then this process, which the server takes no answers from any more.

        Called in the event loop. ``reason`` is the line for the log.
        """
        if self._ending.is_set():
            return
        # This process is Triton's stub. A dead stub is what Triton 26.03 and later, and probes, can
        # see. A timer ends it, not the loop: vLLM's shutdown holds the loop, and may raise or hang.
        # What is left of vLLM ends with this process (``startup.guard``).
        end = threading.Timer(LAST_WORDS_S, self._end_process, (1,))
        end.daemon = True
        end.start()
        # The log goes through Triton's shared memory, which may be full.
        with contextlib.suppress(Exception):
            self._log.error(reason)
        self._source.forsake(reason)
        self._end_early(NOT_TAKEN, UnavailableError)

    def _end_early(self, reason: str, kind: type[UnavailableError]) -> None:
        """Shut vLLM down before the server unloads the model.

        Requests in flight and later ones get an error of this kind with this reason.
        """
        self._ending.set()
        self.runner.lose(reason, kind)
        self._source.close()
        self._llm.shutdown()
        self._log.info("the engine has ended; the server waits for its clients")

    async def _drain(self, grace_s: float) -> None:
        """Wait for the requests in flight, then end vLLM and everything else in the loop."""
        end = self._loop.time() + grace_s
        ledger = self.jobs.ledger
        if self._front is not None:
            self._front.leave()
        # 1) Wait. Polled once per unload, because an event would have to be set for each request.
        while not ledger.is_empty() and self._loop.time() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        # 2) Refuse the rest.
        self.jobs.refuse_all(UNLOADED)
        # Lets the tasks begin that stop the refused requests.
        await asyncio.sleep(0)
        if self._front is not None:
            await self._front.close()
        # 3) End vLLM and what is left in the loop.
        self._source.close()
        self._llm.shutdown()
        if self.runner.store is not None:
            self.runner.store.close()
        # A loop that is closed with open tasks logs each of them as destroyed.
        rest = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
