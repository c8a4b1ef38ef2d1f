"""Load the model, then pass each request from room to room; only ``model.py`` imports this.

``request`` checks it, ``engine`` runs it, ``reply`` sends its outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_vllm.base import official, python_logs, triton
from triton_vllm.base.errors import AdapterError, ConfigError, InternalError
from triton_vllm.reply.reply import NoOutputs, Reply
from triton_vllm.request.admit import admit
from triton_vllm.request.kinds import Served
from triton_vllm.startup import interpreter
from triton_vllm.startup.abandoned import AbandonedLoad
from triton_vllm.startup.load import load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.base.protocols import TritonRequest
    from triton_vllm.openai.server import Plan


class Service:
    """A loaded model.

    Args:
        args: the arguments that Triton passes to ``initialize``.

    Raises:
        ConfigError: the model's files are wrong.
    """

    def __init__(self, args: Mapping[str, str]) -> None:
        self._name = args["model_name"]
        self._log = triton.Log(self._name)
        python_logs.send_to(self._log)
        # The server can give the load up until `initialize` returns, also while the port opens.
        with AbandonedLoad():
            self._load(args)

    def _load(self, args: Mapping[str, str]) -> None:
        """Load the model, collect what checks its requests, and open its OpenAI port, if any."""
        self._model = load(args, self._log)
        prepared = self._model.prepared
        settings = prepared.settings
        self._restarts = settings.restart
        engine = self._model.engine
        when_dead = None
        if settings.health_check:
            when_dead = self._unload
            engine.runner.check_health(self._unload)
        self._dialect = settings.dialect
        # Releases are written YY.MM. One that is not known is "", and counts as an old one.
        self._errors_apart = prepared.server >= triton.ERRORS_APART_SINCE
        self._served = Served(
            name=self._name,
            vllm=prepared.vllm,
            fit=engine.fit(when_dead),
            find_adapter=prepared.adapters.find,
            parsers=self._model.parsers,
        )
        if prepared.openai is not None:
            self._serve_openai(prepared.openai)

    def _serve_openai(self, plan: Plan) -> None:
        """Let vLLM's OpenAI server serve the engine, too.

        Raises:
            ConfigError: it did not start. The model has then been closed.
        """
        # Imported here: a model without this server needs nothing of that room.
        from triton_vllm.openai import start

        prepared = self._model.prepared
        engine = self._model.engine
        # A request that finds the engine dead does not unload the model here. The call waits for
        # Triton's server, and these requests are checked in the event loop.
        fit = engine.fit(when_dead=None)
        try:
            engine.attach(
                start.make_server(
                    plan,
                    engine,
                    fit,
                    vllm=prepared.vllm,
                    adapters=prepared.adapters,
                    refusals=self._model.refusals,
                )
            )
            if self._model.shared is not None:
                self._model.shared.reserve_metrics()
            # Again, because the application has as many objects as the rest of the adapter. The
            # garbage collector need not visit them either.
            interpreter.tune()
            self._log.info(f"vLLM's OpenAI server listens on port {plan.port.number}")
        # vLLM may raise anything, and each is a reason why the load failed.
        except Exception as error:
            self._model.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"vLLM's OpenAI server did not start: {type(error).__name__}: {error}"
            ) from error

    def accept(self, request: TritonRequest) -> None:
        """Take one Triton request; it is answered later, or at once if it is refused."""
        channel = triton.Channel(
            request,
            self._dialect,
            self._log,
            self._model.outbox.later(),
            errors_apart=self._errors_apart,
            refusals=self._model.refusals,
        )
        try:
            call = admit(request, self._served, self._dialect)
        except AdapterError as error:
            self._refuse(channel, error)
            return
        # vLLM's parsers may raise anything.
        except Exception as error:  # noqa: BLE001
            # The client gets no details: they may be the server's own.
            self._log.error(f"request refused: {type(error).__name__}: {error}")
            text = "the request could not be prepared; the server's log has the details"
            self._refuse(channel, InternalError(text))
            return
        lane = self._model.outbox.lane(bulky=call.bulky)
        reply = Reply(channel, call.assembler, lane, bulky=call.bulky, streams=call.streams)
        call.start(self._model.engine.runner, reply)
        # The watch sleeps while nothing is in flight, so it is woken after the job has entered.
        self._model.watch.wake()

    def _refuse(self, channel: triton.Channel, error: AdapterError) -> None:
        # Not in Triton's own thread: if the server does not take the refusal, all later requests
        # would wait.
        Reply(channel, NoOutputs(), self._model.outbox.lane()).end(error)

    def is_ready(self) -> bool:
        """Return whether requests can be served now."""
        return self._model.engine.jobs.is_up()

    def close(self) -> None:
        """Unload the model; the requests in flight may finish within a time limit."""
        jobs = self._model.engine.jobs.ledger.jobs()
        self._log.info(f"unloading, {len(jobs)} requests in flight")
        self._model.close()
        self._log.info("unloaded")

    def _unload(self) -> None:
        """Ask the server to unload the model, unless its engine is started again."""
        if self._restarts:
            return
        self._log.error(official.UNHEALTHY_LINE)
        try:
            triton.unload(self._name)
        # The request that has found the engine dead must still get its error.
        except Exception as error:  # noqa: BLE001
            self._log.error(
                f"the model was not unloaded: {error}; "
                "tritonserver unloads models only with --model-control-mode=explicit"
            )
