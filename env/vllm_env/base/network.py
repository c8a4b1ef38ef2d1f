"""The only way to a network: every program and call that may fetch something starts here. ``--offline`` forbids them all.

When it is offline, uv uses the wheelhouse or its own cache. Everything else is refused with an error that names the
missing item. ``options`` are the parameters ``env``, ``on_line`` and ``remedy`` of ``base.process.run``.

uv does not read pip's configuration. It therefore gets pip's indexes, find-links folders, certificates and trusted hosts
as arguments.
"""

import ast
import functools
import hashlib
import http.client
import os
import re
import socket
import ssl
import sys
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import CommandError, VllmEnvError
from .filesystem import write_whole
from .process import capture, run

_NAMES = ("index-url", "extra-index-url", "find-links", "cert", "trusted-host", "no-index")


@dataclass(frozen=True)
class PipConfig:
    """The configuration of pip on this machine; every field may be empty."""

    index_url: str = ""
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    cert: str = ""
    no_index: bool = False

    def uv_arguments(self) -> list[str]:
        """Return the same configuration as options of ``uv pip``."""
        arguments = ["--no-index"] if self.no_index else []
        if self.index_url:
            arguments += ["--default-index", self.index_url]
        for url in self.extra_index_urls:
            arguments += ["--index", url]
        for place in self.find_links:
            arguments += ["--find-links", place]
        for host in self.trusted_hosts:
            arguments += ["--allow-insecure-host", host]
        # pip takes the best version of all indexes. By default uv stops at the first index that has the package.
        return [*arguments, "--index-strategy", "unsafe-best-match"]

    def uv_environment(self) -> dict[str, str]:
        """Return the environment variables that uv needs in addition: pip's certificate, unless SSL_CERT_FILE is set."""
        return (
            {"SSL_CERT_FILE": self.cert}
            if self.cert and not os.environ.get("SSL_CERT_FILE")
            else {}
        )


def read_pip_config(python: str = sys.executable) -> PipConfig:
    """Read pip's configuration from ``pip config list``: files and ``PIP_*`` variables; the variables win."""
    status, listing = capture(
        [python, "-I", "-m", "pip", "config", "list"]
    )  # -I: import nothing from the current folder
    return parse_pip_config(listing if status == 0 else "")


def parse_pip_config(listing: str) -> PipConfig:
    """Parse lines like ``global.index-url='…'``; ignore sections for pip commands other than ``install``."""
    values: dict[str, str] = {}
    for rank in ("global", "install", ":env:"):  # the later ones win, as in pip
        for line in listing.splitlines():
            key, _, literal = line.partition("=")
            section, _, name = key.rpartition(".")
            if section == rank and name in _NAMES:
                values[name] = str(ast.literal_eval(literal))
    return PipConfig(
        index_url=values.get("index-url", ""),
        extra_index_urls=tuple(values.get("extra-index-url", "").split()),
        find_links=tuple(values.get("find-links", "").split()),
        trusted_hosts=tuple(values.get("trusted-host", "").split()),
        cert=values.get("cert", ""),
        no_index=values.get("no-index", "").lower() in ("1", "true", "yes", "on"),
    )


_CONNECT_TIMEOUT = 3.0  # s; without network access a user must not wait long
_READ_TIMEOUT = 60.0  # s between two parts of a file
_PYTORCH = "https://download.pytorch.org/whl"  # uv knows this index, pip does not
_NO_PROMPT = {
    "GIT_TERMINAL_PROMPT": "0"
}  # a private mirror without credentials must fail and not wait for a password
_REMEDY = "Check the network, the proxy (HTTPS_PROXY, NO_PROXY) and the registries that pip is configured with (pip config list)."
# Patterns in the output of uv, pip, git, cmake and rattler when no host answered, and their meaning.
_FAILURES = {
    r"dns error|ould not resolve|ame resolution|ame or service not known|getaddrinfo": "A host's name is not resolved.",
    r"onnection refused|onnection reset|Failed to connect|NewConnectionError|tcp connect error": "No connection.",
    r"etwork is unreachable|No route to host": "The network is unreachable.",
    r"peration timed out|onnection timed out|ReadTimeout|ConnectTimeout|deadline has elapsed": "The connection timed out.",
    r"invalid peer certificate|CERTIFICATE_VERIFY_FAILED|SSL certificate problem": "A certificate is not trusted (PIP_CERT).",
    r"[Tt]unnel (connection failed|error)|[Pp]roxy ?[Ee]rror|407 Proxy": "The proxy refuses.",
    r"HTTP status (server error|client error \((?!404))|error decoding response": "A registry or a proxy refuses.",
}


class NetworkError(CommandError):
    """A host did not answer, or ``--offline`` forbids the request."""


@dataclass(frozen=True)
class Network:
    """The allowed sources of files: pip's sources, only a wheelhouse, or no source (``offline``).

    Attributes:
        pip: pip's configuration.
        offline: whether nothing may be fetched from a network.
        wheelhouse: a folder filled by ``wheelhouse``; uv then takes wheels from it only.
        torch_index: a mirror that replaces the PyTorch project's index (VLLM_ENV_TORCH_INDEX).
        program_caches: folder for the caches of uv and pip; None leaves their caches where they are.
    """

    pip: PipConfig = field(default_factory=PipConfig)
    offline: bool = False
    wheelhouse: Path | None = None
    torch_index: str = ""
    program_caches: Path | None = None

    def uv(
        self, arguments: Sequence[object], what: str, *, torch_backend: str = "", **options: Any
    ) -> str:
        """Run uv with the configured sources and return what it printed.

        If these sources lack a torch build (``torch_backend``, such as ``cpu``), ask the PyTorch project's index, too.

        Raises:
            NetworkError: no host answers.
        """
        sources = [*(["--offline"] if self.offline else []), *self.pip.uv_arguments()]
        if self.wheelhouse:
            sources = ["--offline", "--no-index", "--find-links", str(self.wheelhouse)]
        command = [Path(sys.executable).parent / "uv", *arguments, *sources]
        options["env"] = {**self.pip.uv_environment(), **options.get("env", {})}
        own = ["--torch-backend", torch_backend]
        return self._with_torch(
            command, "--index", own, what, torch_backend=torch_backend, **options
        )

    def _with_torch(
        self, command: Sequence[object], index: str, own: Sequence[str], what: str, **options: Any
    ) -> str:
        """Run uv or pip; for ``torch_backend`` with the mirror (``index``), or after a failure with PyTorch's index (``own``)."""
        torch = options.pop("torch_backend") and not self.wheelhouse
        if self.program_caches:
            places = {
                f"{name}_CACHE_DIR": str(self.program_caches / name.lower())
                for name in ("UV", "PIP")
            }
            options["env"] = {**places, **options.get("env", {})}
        mirror = [index, self.torch_index] if torch and self.torch_index else []
        try:
            return _run([*command, *mirror], what, **options)
        except CommandError as error:
            # Only a failure about torch can be solved by PyTorch's index.
            if not torch or mirror or self.offline or "torch" not in error.tail:
                raise
            try:
                return _run([*command, *own], what, **options)
            except CommandError:
                # Show the first error: it is about the sources that the user configured.
                raise error from None

    def pip_command(
        self, arguments: Sequence[object], what: str, *, torch_backend: str = "", **options: Any
    ) -> str:
        """Run the packager's own pip, which reads its own configuration. Errors as in :meth:`program`, torch as in :meth:`uv`."""
        self.require(what)
        own = ["--extra-index-url", f"{_PYTORCH}/{torch_backend}"]
        command = [sys.executable, "-I", "-m", "pip", *arguments]
        return self._with_torch(
            command, "--extra-index-url", own, what, torch_backend=torch_backend, **options
        )

    def git(self, arguments: Sequence[object], what: str, **options: Any) -> str:
        """Run git without password prompts; errors as in :meth:`program`. A repository in a folder needs no network."""
        if any(str(argument).startswith("file:") for argument in arguments):
            return _run(["git", *arguments], what, **options)
        return self.program(["git", *arguments], what, **options)

    def program(self, argv: Sequence[object], what: str, **options: Any) -> str:
        """Run a program that fetches something and return what it printed.

        Raises:
            NetworkError: no host answers, or ``--offline`` is set.
        """
        self.require(what)
        return _run(argv, what, **options)

    def require(self, what: str) -> None:
        """Raise a NetworkError that names ``what`` was needed if ``--offline`` is set."""
        if self.offline:
            raise NetworkError(
                f"--offline: cannot {what}.",
                cause="It is neither in the wheelhouse nor in the cache, and --offline touches no network.",
                remedy="Fill a wheelhouse on a machine with network (./gen_vllm_env.sh wheelhouse DIR), or omit --offline.",
            )

    def download(self, url: str, sha256: str, target: Path) -> None:
        """Fetch a file that appears completely or not at all.

        Raises:
            VllmEnvError: the file cannot be fetched, or its SHA-256 differs.
        """
        if not url.startswith("file:"):
            self.require(f"fetch {target.name}")
        try:
            trust = ssl.create_default_context(cafile=self.pip.cert or None)
            with urllib.request.urlopen(url, timeout=_READ_TIMEOUT, context=trust) as source:  # noqa: S310 - a channel's address
                data = (
                    source.read()
                )  # in one read: reads of a given size do not notice a truncated reply
            if hashlib.sha256(data).hexdigest() != sha256:
                raise VllmEnvError(
                    f"{url} is not the lock's file: its SHA-256 differs.",
                    remedy="Resolve again with --upgrade.",
                )
            write_whole(target, data)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NetworkError(f"{url} cannot be fetched: {error}.", remedy=_REMEDY) from error

    def answers(self, url: str) -> bool:
        """Return whether the host of a URL, or the proxy in front of it, accepts a connection within 3 s."""
        try:
            parts = urllib.parse.urlsplit(url)
            is_folder = parts.scheme == "file" and Path(parts.path).is_dir()
            return is_folder or (
                parts.scheme != "file" and not self.offline and _connects(*_first_hop(parts))
            )
        except ValueError:  # the address of the host or the proxy is not valid
            return False


def _first_hop(parts: urllib.parse.SplitResult) -> tuple[str, int]:
    """Return the host and port to connect to: the proxy's (its URL may lack a scheme) or the URL's own."""
    proxy = urllib.request.getproxies().get(parts.scheme, "")
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)


@functools.cache
def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT).close()
    except OSError:
        return False
    return True


def _run(argv: Sequence[object], what: str, **options: Any) -> str:
    options["env"] = {**_NO_PROMPT, **options.get("env", {})}
    try:
        return run(argv, what=what, **options)
    except CommandError as error:
        meaning = next(
            (text for pattern, text in _FAILURES.items() if re.search(pattern, error.tail)), ""
        )
        if not meaning:
            raise
        raise NetworkError(
            f"Could not {what}: the network failed.", tail=error.tail, cause=meaning, remedy=_REMEDY
        ) from error
