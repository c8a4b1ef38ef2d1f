"""One engine for all instances of a model.

One instance launches it, and the others are further front ends of it. Tokenizing, detokenizing and
sending are then spread over as many interpreters. ``rendezvous`` says how instances find each
other.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import mmap
import os
import struct
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from triton_vllm import vllm_api
from triton_vllm.base.errors import ConfigError
from triton_vllm.instances.counts import Counts
from triton_vllm.instances.rendezvous import Rendezvous, seat
from triton_vllm.instances.sleep import SleepState
from triton_vllm.instances.source import Loss, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from triton_vllm.base.protocols import EngineClient, Log, PrometheusFamily
    from triton_vllm.instances.rendezvous import Address, Seat
    from triton_vllm.vllm_api import Vllm

SLEEP_GAUGE = "vllm:engine_sleep_state"
"""vLLM's gauge of whether the engine sleeps."""
LOOK_PERIOD_S = 0.2
"""Seconds between two looks for an engine to connect to."""
FIRST_INSTANCE_S = 120.0
"""How many seconds an instance waits for the first one of its load.

Triton starts both at the same time.
"""


def join(args: Mapping[str, str], log: Log) -> Frontends | None:
    """Return this instance's part in an engine that several share.

    None if it is the only instance of its group on its device: then it shares nothing.

    Args:
        args: the arguments that Triton passes to ``initialize``.
        log: reports which instance leads.

    Raises:
        ConfigError: no private folder can be made, or the instance was added to a loaded model.
    """
    own = seat(args, os.getppid())
    return None if own is None else Frontends(own, Rendezvous.join(own), log)


class Frontends(Source):
    """An instance's way to the engine that it shares with others.

    Args:
        own: which instance this is.
        rendezvous: where it meets the others.
        log: reports which instance leads.
    """

    alone = False

    def __init__(self, own: Seat, rendezvous: Rendezvous, log: Log) -> None:
        self._own = own
        self._meeting = rendezvous
        self._log = log
        # `use` sets these three, `counts` and `sleep_state`. vLLM is imported only after the
        # instances have met.
        self._vllm: Vllm
        self._values: Mapping[str, Any]
        self._figures: mmap.mmap
        # The name of the engine that this instance has launched or connected to last; "" before.
        self._engine = ""
        # Where an engine that this instance has launched publishes its load.
        self._statistics: str | None = None
        # One instance must start the engine, and only the first one always exists.
        if own.index == 0:
            rendezvous.lead()

    def use(self, vllm: Vllm, values: Mapping[str, Any], ranks: int) -> None:
        """Take what was not known when the instances met; make the memory that they share.

        Args:
            vllm: the loaded vLLM.
            values: the engine arguments.
            ranks: the number of data-parallel ranks.

        Raises:
            ConfigError: this vLLM cannot serve several front ends from one engine.
        """
        lacking = vllm_api.lacking(vllm)
        if lacking:
            raise ConfigError(
                f"instance_group: count is {self._own.count}, but vLLM {vllm.version} cannot "
                f"serve several front ends from one engine (it has no {lacking}); use count: 1"
            )
        self._vllm = vllm
        self._values = values
        count = self._own.count
        self._figures = self._meeting.memory("figures", ranks * count * struct.calcsize("d"))
        memory = self._meeting.memory("requests", Counts.size(count))
        self.counts = Counts(memory, self._own.index, count)
        memory = self._meeting.memory("sleep", SleepState.size(count))
        turn = self._meeting.path("operator")
        self.sleep_state = SleepState(memory, self._own.index, count, turn)

    @property
    def count(self) -> int:
        """How many instances share the engine."""
        return self._own.count

    @property
    def leads(self) -> bool:
        """Whether this instance has launched the engine, or must launch it."""
        return self._meeting.leads

    @property
    def is_first(self) -> bool:
        """Whether this is the instance that launches the engine when the model is loaded."""
        return self._own.index == 0

    def adapters(self) -> Path:
        """Return the folder for the copies of LoRA adapters."""
        folder = self._meeting.path("adapters")
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def metrics(self) -> Path:
        """Return the folder for the Prometheus metrics of all instances."""
        folder = self._meeting.path("metrics")
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def reserve_metrics(self) -> None:
        """Reserve the space of this instance's metrics, once they exist.

        prometheus_client makes sparse files. If the disk were full later, a write to one would end
        the process.

        Raises:
            OSError: there is no room for the files.
        """
        for path in self.metrics().glob(f"*_{os.getpid()}.db"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)

    async def start(self, *, in_thread: bool = False) -> EngineClient:
        """Launch the engine, or wait for it and connect; see ``Source``.

        Raises:
            Exception: vLLM's own exception; ConfigError if the leading instance has failed.
        """
        until = time.monotonic() + FIRST_INSTANCE_S
        while True:
            # Only an instance that has had an engine may take the lead. At first, instance 0 leads.
            if self.leads or (self._engine and self._meeting.lead()):
                return self._noting(await _called(in_thread, self._launch))
            address = self._meeting.address()
            # After a loss, the address of the old engine may still be there.
            if address is not None and address.engine != self._engine:
                return self._noting(await _called(in_thread, partial(self._connect, address)))
            if not self._engine:
                self._require_first(until)
            await asyncio.sleep(LOOK_PERIOD_S)

    def _require_first(self, until: float) -> None:
        """Raise a ConfigError if the load cannot succeed, or the first instance has not come.

        The first instance has time until ``until``, in seconds of the monotonic clock.
        """
        reason = self._meeting.failure()
        if not reason and time.monotonic() > until and not self._meeting.has_first():
            reason = (
                "instance_group: the first instance of the model is not being loaded; "
                "unload the model, then load it again"
            )
        if reason:
            raise ConfigError(reason)

    def _launch(self) -> EngineClient:
        # A new name for each start: the other instances recognize a new engine by it.
        self._engine = uuid.uuid4().hex[:6]
        llm, self._statistics = vllm_api.launch(
            self._vllm, self._values, self._meeting.wires(self._engine)
        )
        return llm

    def _connect(self, address: Address) -> EngineClient:
        """Return a client of the engine that another instance has launched."""
        addresses = {
            "input_address": address.input_address,
            "output_address": address.output_address,
            "stats_update_address": address.stats_update_address,
        }
        # Set even if that engine is gone already: the next one has another name.
        self._engine = address.engine
        return vllm_api.connect(
            self._vllm, self._values, addresses, address.client, self._own.count
        )

    def _noting(self, llm: EngineClient) -> EngineClient:
        """Let a client note in the shared memory when each rank made its figures; return it."""

        def note(rank: int, made: float) -> None:
            """Note that a data-parallel rank made the newest figures of this client at ``made``."""
            position = rank * self._own.count + self._own.index
            struct.pack_into("d", self._figures, struct.calcsize("d") * position, made)

        vllm_api.note_statistics(llm, note)
        return llm

    def latest(self, families: Iterable[PrometheusFamily]) -> list[PrometheusFamily]:
        """Return the families that this instance publishes.

        A rank's gauges are left out if another instance has newer figures of that rank.
        """
        # The shared memory has a row for each rank, with the time of each instance's figures.
        rows = struct.iter_unpack(f"{self._own.count}d", self._figures)
        # The ranks of which this instance has the newest figures.
        ranks = {
            str(rank) for rank, times in enumerate(rows) if times[self._own.index] == max(times)
        }
        published = []
        for family in families:
            if family.name != SLEEP_GAUGE:
                # Counters are each instance's own, and the server adds them up.
                published.append(_gauges_of(ranks, family))
            elif self.sleep_state.is_latest:
                # vLLM changes this gauge only in the front end that was asked.
                published.append(family)
        return published

    def share(self) -> None:
        """Tell the other instances that the engine serves; see ``Source``."""
        verb = "shares"
        # An engine that another instance has started may be asleep.
        if self.leads:
            self.sleep_state.note_change(asleep=False)
            self._meeting.publish(self._engine, self._statistics)
            verb = "has started"
        self._log.info(f"instance {self._own.index} of {self._own.count} {verb} the engine")

    def loss(self) -> Loss | None:
        """Return why the connected engine must be abandoned, or None; see ``Source``."""
        # 1) Requests of instances that have ended no longer count.
        for index in self._meeting.gone():
            self.counts.forget(index)
            self.sleep_state.forget(index)
        # 2) Has an instance given the engine up for all? The file is missing if not. It is empty
        #    while that instance is writing it.
        with contextlib.suppress(OSError):
            reason = self._meeting.path("forsaken").read_text(encoding="utf-8")
            if reason:
                return Loss(reason, for_good=True)
        # 3) The instance that has started the engine sees its end itself, but not what others see.
        if self.leads:
            is_hung = self._meeting.is_hung(self._engine)
            return Loss("does not answer another instance") if is_hung else None
        # 4) The engine of another instance has ended if that instance has, or has withdrawn it.
        if self._meeting.closed():
            return Loss("was unloaded with the instance that had started it", in_order=True)
        # If that instance was killed, this one now leads, and starts a new engine. So what the
        # others have in flight is answered. Triton needs a second for each request to a dead stub,
        # and under load nearly all go to the others.
        if self._meeting.lead():
            return Loss("has died with the instance that had started it")
        address = self._meeting.address()
        still_serves = address is not None and address.engine == self._engine
        return None if still_serves else Loss("has died")

    def retire(self, *, hung: bool) -> None:
        """Make the other instances abandon the engine; see ``Source``."""
        if self.leads:
            self._meeting.withdraw(self._engine, closed=False)
        elif hung:
            self._meeting.report_hung(self._engine)

    def forsake(self, reason: str) -> None:
        """Make the other instances end the engine for good, too; see ``Source``."""
        # With the others alone, the server would look healthy, and a part of the requests would get
        # errors for ever.
        with contextlib.suppress(OSError):
            self._meeting.path("forsaken").write_text(reason, encoding="utf-8")

    def close(self) -> None:
        """Tell the other instances that this one is unloaded; see ``Source``."""
        # The engine ends with the instance that has started it.
        if self.leads:
            self._meeting.withdraw(self._engine, closed=True)

    def leave(self, failure: str = "") -> None:
        """End this instance's part; if the load has failed, ``failure`` is the reason."""
        if failure:
            self._meeting.fail(failure)
            # No other instance may start the engine either.
            self.close()
        self._meeting.leave()


async def _called(in_thread: bool, make: Callable[[], EngineClient]) -> EngineClient:  # noqa: FBT001
    return await asyncio.to_thread(make) if in_thread else make()


def _gauges_of(ranks: set[str], family: PrometheusFamily) -> PrometheusFamily:
    """Return a family of gauges with the samples of these ranks only; another family as it is."""
    if family.type != "gauge":
        return family
    part: Any = copy.copy(family)
    # vLLM's label `engine` is the rank. A sample without it belongs to rank 0.
    part.samples = [
        sample for sample in family.samples if sample.labels.get("engine", "0") in ranks
    ]
    return cast("PrometheusFamily", part)
