"""Take the port before the engine starts, so that a taken one ends the load at once."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triton_vllm.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

BACKLOG = 2048


@dataclass(frozen=True)
class Port:
    """A port that is kept for the model.

    Attributes:
        number: the port.
        listen: returns the listening socket. Called when the engine runs.
    """

    number: int
    listen: Callable[[], socket.socket]


def is_loopback(host: str) -> bool:
    """Return whether only programs of this machine can reach a host's address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def claim(host: str, port: int, *, shared: bool = False, first: bool = True) -> socket.socket:
    """Return a socket that listens; connections wait until the server takes them.

    Args:
        host: the address or name.
        port: the port.
        shared: whether other instances of the model listen on the same port.
        first: whether this is the first instance. The others come when it listens.

    Raises:
        ConfigError: the port is taken, or the address is not one of this machine.
    """
    try:
        if shared and first:
            return _listen_first(host, port)
        return _listen(host, port, shared=shared)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"config.pbtxt: OPENAI_PORT: port {port} of {host} is taken, by another model or "
                "another program; choose another one"
            ) from None
        raise ConfigError(
            f"config.pbtxt: OPENAI_HOST: {host}:{port} cannot be used: {error}"
        ) from None


def _listen_first(host: str, port: int) -> socket.socket:
    """Return a listening socket whose port the other instances of this model can join.

    Raises:
        OSError: another program or model has the port.
    """
    # Triton loads models at the same time. Of two models with this port, only one may be in this
    # block: the other one cannot bind the same name. The kernel frees the name of an abstract
    # socket when the socket is closed.
    with socket.socket(socket.AF_UNIX) as turn:
        # Without the host: one address may be written in several ways, and a name may mean several.
        turn.bind(f"\0triton_vllm.openai {port}")
        # A port that is shared can be joined by any program of this user, another model among
        # them. So this instance takes it alone for a moment.
        _listen(host, port, shared=False).close()
        return _listen(host, port, shared=True)


def _listen(host: str, port: int, *, shared: bool) -> socket.socket:
    """Return a listening socket; other sockets may listen on the same port if it is ``shared``.

    Raises:
        OSError: the port is taken, or the address is not one of this machine.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    taken = socket.socket(family, kind, protocol)
    try:
        # For a port whose connections of an earlier server are still closing.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(address)
        # Until somebody listens, Linux lets others bind the same port.
        taken.listen(BACKLOG)
    except OSError:
        taken.close()
        raise
    return taken
