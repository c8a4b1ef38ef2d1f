"""Serve the port in the engine's event loop, from the engine's start until its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.errors import ConfigError
from triton_vllm.openai.acceptor import Acceptor
from triton_vllm.openai.checked_engine import CheckedEngine
from triton_vllm.openai.connection import MOST_REFUSED, bounded
from triton_vllm.openai.middleware import Middleware

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triton_vllm.base.protocols import EngineClient
    from triton_vllm.openai.checked_engine import Rules
    from triton_vllm.openai.port import Port

CLOSE_S = 2.0
"""How long the errors of requests that were cut off may take to be written, s."""
# Before its request is known, each may hold a third of a megabyte.
CONNECTIONS = 2048
"""The most open connections."""
_TLS = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers")


@dataclass(frozen=True)
class Plan:
    """What the port is served with.

    Attributes:
        args: the arguments of vLLM's server.
        key: the API key. Empty if there is none.
        port: where it listens.
    """

    args: Any
    key: str
    port: Port

    def config(self, app: Any) -> Any:
        """Return uvicorn's configuration.

        Raises:
            ConfigError: an argument is wrong, such as a certificate that cannot be read.
        """
        import uvicorn

        args = self.args
        access = not args.disable_uvicorn_access_log
        config = uvicorn.Config(
            app,
            http=bounded(),
            # Requests to upgrade a connection are answered as if they had not asked.
            ws="none",
            lifespan="off",
            interface="asgi3",
            # Without it, uvicorn adds no handler to this process's loggers.
            log_config=uvicorn.config.LOGGING_CONFIG if access else None,
            log_level=args.uvicorn_log_level,
            access_log=access,
            proxy_headers=False,
            # Each connection is an open file. Half of the files are for vLLM and the model.
            limit_concurrency=min(CONNECTIONS, _raise_file_limit() // 2),
            timeout_graceful_shutdown=int(CLOSE_S),
            **{name: getattr(args, name) for name in _TLS},
        )
        try:
            config.load()
        # OpenSSL's and Python's exceptions about files.
        except (OSError, ValueError) as error:
            raise ConfigError(f"vllm_openai_args.json: the TLS files: {error}") from None
        return config


class Server:
    """The port of one instance; all methods but ``__init__`` run in the engine's event loop.

    Args:
        plan: what it is served with.
        rules: what a request must pass.
        note: logs an exception of vLLM's application.
    """

    def __init__(self, plan: Plan, rules: Rules, note: Callable[[str, Exception], None]) -> None:
        self._plan = plan
        self._rules = rules
        self._middleware = Middleware(rules, plan.key, note)
        self._application: vllm_api.Application | None = None
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def use(self, llm: EngineClient, tasks: Sequence[str]) -> None:
        """Answer with this engine from now on; the first one opens the port.

        Raises:
            Exception: vLLM's own exception; ConfigError if the port cannot be opened.
        """
        checked: Any = CheckedEngine(llm, self._rules)
        # The application is built once. A later engine takes the place of the first one.
        if self._application is None:
            self._application = vllm_api.build_application(
                self._rules.vllm, checked, self._plan.args, tasks
            )
        await self._application.use(checked, tasks)
        for name in self._rules.adapters.listed:
            self._application.add_adapter(name)
        self._middleware.llm = llm
        self._middleware.application = self._application
        if self._serving is None:
            await self._open()

    def leave(self) -> None:
        """Take no more requests."""
        self._middleware.leave()

    async def close(self) -> None:
        """End the connections; the requests have been ended."""
        self._middleware.close()
        if self._serving is None or self._accepting is None:
            return
        self._accepting.cancel()
        self._server.should_exit = True
        # The server itself cancels what takes longer than `CLOSE_S`.
        await asyncio.wait({self._serving}, timeout=2 * CLOSE_S)
        for connection in [*self._server.server_state.connections]:
            connection.transport.abort()

    async def _open(self) -> None:
        """Start uvicorn's server, and give it the port's connections.

        Raises:
            ConfigError: the server does not start, or the port cannot be opened.
        """
        import uvicorn

        config = self._plan.config(self._middleware)
        self._server = uvicorn.Server(config)
        state = self._server.server_state
        acceptor = Acceptor(
            self._plan.port.listen(),
            partial(config.http_protocol_class, config=config, server_state=state, app_state={}),
            config.ssl,
            state.connections,
            config.limit_concurrency + MOST_REFUSED,
        )
        _release_in_children(acceptor, self._server)
        # Without sockets: the acceptor has the port, and gives the server its connections.
        self._serving = asyncio.create_task(self._server.serve(sockets=[]))
        # uvicorn tells nobody when it has begun.
        while not self._server.started and not self._serving.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if self._serving.done():
            raise ConfigError("OPENAI_PORT: the server did not start; the log has the reason")
        self._accepting = asyncio.create_task(acceptor.run())


def _raise_file_limit() -> int:
    """Raise this process's limit of open files to its hard limit; return the limit."""
    # Each connection is an open file.
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        limit = hard_limit
    # Without a limit, there are enough files for all connections.
    return 2 * CONNECTIONS if limit == resource.RLIM_INFINITY else limit


def _release_in_children(acceptor: Acceptor, server: Any) -> None:
    """Close the port and its connections in each process that is forked from this one.

    An engine that starts again would otherwise hold them: a client would not see the end of its
    connection, and the port would stay taken.
    """
    # What is registered here stays for the process's life. It must not keep the server.
    known = weakref.ref(server)

    def release() -> None:
        """Close the sockets in the new process; without effect if the server is gone."""
        alive = known()
        if alive is None:
            return
        sockets = acceptor.sockets
        sockets += [c.transport.get_extra_info("socket") for c in alive.server_state.connections]
        for own in sockets:
            # Closing the object would use the parent's event loop.
            with contextlib.suppress(OSError, AttributeError):
                os.close(own.fileno())

    os.register_at_fork(after_in_child=release)
