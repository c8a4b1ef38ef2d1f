"""The only way to a network: every program and call that may fetch something starts here.

``--offline`` forbids them all. Only uv still runs: it uses the wheelhouse or its own cache.
The error names what could not be fetched.

``options`` are the parameters ``env``, ``on_line`` and ``remedy`` of ``base.process.run``.
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

from .command import COMMAND
from .errors import CommandError, VllmEnvError
from .filesystem import write_whole
from .process import capture, run
from .sources import Source, uv_places

# The settings of pip that say where packages come from.
_PIP_OPTIONS = ("index-url", "extra-index-url", "find-links", "cert", "trusted-host", "no-index")
# The user's settings of uv that count here: where packages come from, how to get there, and uv's
# cache. The others may change the packages, or where they go: UV_CONSTRAINT, UV_EXCLUDE_NEWER,
# UV_PRERELEASE, UV_NO_BINARY, UV_TORCH_BACKEND. uv reads the file of UV_CONFIG_FILE despite
# --no-config.
_UV_SOURCES = re.compile(
    r"UV_(DEFAULT_INDEX|INDEX\w*|EXTRA_INDEX_URL|FIND_LINKS|\w+_MIRROR(_URL)?|\w+_ENDPOINT_URL"
    r"|KEYRING_PROVIDER|CREDENTIALS_DIR|GITHUB_TOKEN|INSECURE_HOST|NATIVE_TLS|SYSTEM_CERTS|OFFLINE"
    r"|HTTP_\w+|REQUEST_TIMEOUT|CONCURRENT_\w+|CACHE_DIR|NO_CACHE|LOCK_TIMEOUT)"
)
# s; a user without network access must not wait long.
_CONNECT_SECONDS = 3.0
# s between two parts of a file.
_READ_SECONDS = 60.0
# uv knows this index, pip does not.
_PYTORCH = "https://download.pytorch.org/whl"
# A private mirror without credentials must fail and not wait for a password.
_NO_PROMPT = {"GIT_TERMINAL_PROMPT": "0"}
_REMEDY = (
    "Check the network, the proxy (HTTPS_PROXY, NO_PROXY) and the registries that pip is "
    "configured with (pip config list)."
)
# Patterns in the output of uv, pip, git, cmake and rattler if no host answered, and their meaning.
# Without them, a user reads uv's "no solution" for a refused connection.
_FAILURES = (
    (
        r"dns error|ould not resolve|ame resolution|ame or service not known|getaddrinfo",
        "A host's name is not resolved.",
    ),
    (
        r"onnection (refused|reset)|Failed to connect|NewConnectionError|tcp connect error",
        "No connection.",
    ),
    (r"etwork is unreachable|No route to host", "The network is unreachable."),
    (
        r"peration timed out|onnection timed out|ReadTimeout|ConnectTimeout|deadline has elapsed",
        "The connection timed out.",
    ),
    (
        r"invalid peer certificate|CERTIFICATE_VERIFY_FAILED|SSL certificate problem",
        "A certificate is not trusted (PIP_CERT).",
    ),
    (
        r"[Tt]unnel (connection failed|error)|[Pp]roxy ?[Ee]rror|407 Proxy",
        "The proxy refuses.",
    ),
    (r"HTTP status server error", "A registry or a proxy has failed."),
)
# A 404 is an answer: the package or the commit is missing.
_REFUSAL = r"HTTP status client error \((?!404)|error decoding response"


def require_loopback() -> None:
    """Raise a VllmEnvError if programs cannot connect to each other on 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), _CONNECT_SECONDS).close()
    except OSError as error:
        raise VllmEnvError(
            f"No connection is possible on 127.0.0.1: {error.strerror or error}.",
            cause="The loopback interface is down. tritonserver is asked there, and vLLM's "
            "processes (gloo) meet there.",
            remedy="Bring it up, as root: ip link set lo up. --no-smoke-run builds without it.",
        ) from error


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
        # uv does not read pip's configuration.
        arguments = ["--no-index"] if self.no_index else []
        if self.index_url:
            arguments += ["--default-index", self.index_url]
        for url in self.extra_index_urls:
            arguments += ["--index", url]
        for place in self.find_links:
            arguments += ["--find-links", place]
        for host in self.trusted_hosts:
            arguments += ["--allow-insecure-host", host]
        # pip takes the best version of all indexes. uv stops at the first index with the package.
        return [*arguments, "--index-strategy", "unsafe-best-match"]

    def sources(self) -> list[Source]:
        """Return the sources of this configuration and of uv's variables, each once."""
        # pip's setting counts before uv's. Without any, "" means pip's default index.
        defaults = [self.index_url, *uv_places("UV_DEFAULT_INDEX", "UV_INDEX_URL"), ""]
        default = next((url for url in defaults if url), "")
        indexes = [default, *self.extra_index_urls, *uv_places("UV_INDEX", "UV_EXTRA_INDEX_URL")]
        sources = [] if self.no_index else [Source(url) for url in indexes]
        folders = [*self.find_links, *uv_places("UV_FIND_LINKS")]
        return list(
            dict.fromkeys([*sources, *(Source(place, is_index=False) for place in folders)])
        )

    def uv_environment(self) -> dict[str, str]:
        """Return the variable by which uv gets pip's certificates, unless the user has set it."""
        # uv has no option for them.
        is_needed = self.cert and not os.environ.get("SSL_CERT_FILE")
        return {"SSL_CERT_FILE": self.cert} if is_needed else {}


def without_uv_settings() -> dict[str, str]:
    """Return the variables that uv must not see, each with "": ``process.run`` removes these.

    A user's settings would change uv's results. Those that only say where packages come from, and
    how to get there, stay.
    """
    settings = [name for name in os.environ if name.startswith("UV_")]
    unwanted = [name for name in settings if not _UV_SOURCES.fullmatch(name)]
    return dict.fromkeys(["VIRTUAL_ENV", "CONDA_PREFIX", *unwanted], "")


def read_pip_config(python: str = sys.executable) -> PipConfig:
    """Return pip's configuration as ``pip config list`` prints it; an empty one without pip."""
    # pip itself knows where its files are. -I: import nothing from the current folder.
    status, listing = capture([python, "-I", "-m", "pip", "config", "list"])
    return parse_pip_config(listing if status == 0 else "")


def parse_pip_config(listing: str) -> PipConfig:
    """Parse lines like ``global.index-url='…'``."""
    values: dict[str, str] = {}
    # A later section wins, as in pip. Sections of other commands than install do not count.
    for wanted_section in ("global", "install", ":env:"):
        for line in listing.splitlines():
            # Only at the first "=": a token in an index's URL may contain another one.
            key, _, literal = line.partition("=")
            section, _, name = key.rpartition(".")
            if section == wanted_section and name in _PIP_OPTIONS:
                values[name] = str(ast.literal_eval(literal))
    return PipConfig(
        index_url=values.get("index-url", ""),
        extra_index_urls=tuple(values.get("extra-index-url", "").split()),
        find_links=tuple(values.get("find-links", "").split()),
        trusted_hosts=tuple(values.get("trusted-host", "").split()),
        cert=values.get("cert", ""),
        # The words that pip takes for true.
        no_index=values.get("no-index", "").lower() in ("1", "true", "yes", "on"),
    )


class NetworkError(CommandError):
    """A host did not answer, or ``--offline`` forbids the request."""


class RefusedError(NetworkError):
    """A host answered, but refused this request or sent a part of a file."""


@dataclass(frozen=True)
class Network:
    """The allowed sources of files: pip's sources, only a wheelhouse, or no source (``offline``).

    Attributes:
        pip: pip's configuration.
        offline: whether nothing may be fetched from a network.
        wheelhouse: a folder filled by ``wheelhouse``; uv then takes wheels from it only.
        torch_index: a mirror that replaces the PyTorch project's index (VLLM_ENV_TORCH_INDEX).
        program_caches: folder for the caches of uv and pip; None for their own folders.
    """

    pip: PipConfig = field(default_factory=PipConfig)
    offline: bool = False
    wheelhouse: Path | None = None
    torch_index: str = ""
    program_caches: Path | None = None

    def uv(
        self,
        arguments: Sequence[object],
        what: str,
        *,
        torch_backend: str = "",
        is_torch_elsewhere: bool = False,
        **options: Any,
    ) -> str:
        """Run uv with the configured sources and return what it printed.

        If these sources lack a torch build (``torch_backend``, such as ``cpu``), ask the PyTorch
        project's index, too. If they have another build of it (``is_torch_elsewhere``), ask that
        index at once.

        Raises:
            NetworkError: no host answers.
        """
        if self.wheelhouse:
            sources = ["--offline", "--no-index", "--find-links", str(self.wheelhouse)]
        else:
            sources = self.pip.uv_arguments()
            if self.offline:
                sources.insert(0, "--offline")
        command = [Path(sys.executable).parent / "uv", *arguments, *sources]
        own = options.get("env", {})
        options["env"] = {**without_uv_settings(), **self.pip.uv_environment(), **own}
        pytorch = ["--torch-backend", torch_backend] if torch_backend else []
        if is_torch_elsewhere and not self.wheelhouse and not self.torch_index:
            command += pytorch
            pytorch = []
        return self._run_with_torch(command, what, mirror="--index", pytorch=pytorch, **options)

    def _run_with_torch(
        self,
        command: Sequence[object],
        what: str,
        *,
        mirror: str,
        pytorch: Sequence[str],
        **options: Any,
    ) -> str:
        """Run uv or pip; if its sources lack torch, run it again with PyTorch's index.

        Args:
            command: program and arguments.
            what: purpose of the program for the error message.
            mirror: the program's option for a mirror of PyTorch's index.
            pytorch: the program's arguments for PyTorch's index; empty if no torch is needed.
            options: see the module.
        """
        if self.program_caches:
            places = {
                "UV_CACHE_DIR": str(self.program_caches / "uv"),
                "PIP_CACHE_DIR": str(self.program_caches / "pip"),
            }
            options["env"] = {**places, **options.get("env", {})}
        if not pytorch or self.wheelhouse:
            return _run(command, what, **options)
        # The user named a mirror in place of PyTorch's index.
        if self.torch_index:
            return _run([*command, mirror, self.torch_index], what, **options)
        try:
            return _run(command, what, **options)
        except CommandError as error:
            # Another index helps only if the failure is about torch.
            if self.offline or "torch" not in error.tail:
                raise
            try:
                return _run([*command, *pytorch], what, **options)
            except CommandError:
                # Show the first error: it is about the sources that the user configured.
                raise error from None

    def pip_command(
        self, arguments: Sequence[object], what: str, *, torch_backend: str = "", **options: Any
    ) -> str:
        """Run the packager's own pip; errors as in :meth:`program`, torch as in :meth:`uv`."""
        self.require(what)
        option = "--extra-index-url"
        pytorch = [option, f"{_PYTORCH}/{torch_backend}"] if torch_backend else []
        command = [sys.executable, "-I", "-m", "pip", *arguments]
        return self._run_with_torch(command, what, mirror=option, pytorch=pytorch, **options)

    def sources(self, torch_backend: str = "") -> list[Source]:
        """Return the configured sources, with the one that has the torch builds if needed."""
        sources = self.pip.sources()
        if torch_backend:
            sources.append(Source(self.torch_index or f"{_PYTORCH}/{torch_backend}"))
        return sources

    def git(self, arguments: Sequence[object], what: str, **options: Any) -> str:
        """Run git without password prompts; errors as in :meth:`program`."""
        # A repository in a folder needs no network.
        if not any(str(argument).startswith("file:") for argument in arguments):
            self.require(what)
        return _run(["git", *arguments], what, **options)

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
                cause="It is neither in the wheelhouse nor in the cache, "
                "and --offline touches no network.",
                remedy="Fill a wheelhouse on a machine with network "
                f"({COMMAND} wheelhouse DIR), or omit --offline.",
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
            # A channel may be a folder, so file: is allowed.
            reply = urllib.request.urlopen(url, timeout=_READ_SECONDS, context=trust)  # noqa: S310
            with reply as source:
                # In one read: reads of a given size do not notice a truncated reply.
                data = source.read()
            if hashlib.sha256(data).hexdigest() != sha256:
                raise VllmEnvError(
                    f"{url} is not the lock's file: its SHA-256 differs.",
                    remedy="Resolve again with --upgrade.",
                )
            write_whole(target, data)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NetworkError(f"{url} cannot be fetched: {error}.", remedy=_REMEDY) from error

    def answers(self, url: str) -> bool:
        """Return whether a URL's host, or the proxy in front of it, accepts a connection in 3 s."""
        try:
            parts = urllib.parse.urlsplit(url)
            if parts.scheme == "file":
                return Path(parts.path).is_dir()
            return not self.offline and _connects(*_first_hop(parts))
        # The address of the host or the proxy is not valid. A later download reports it.
        except ValueError:
            return False


def _first_hop(parts: urllib.parse.SplitResult) -> tuple[str, int]:
    """Return the host and port to connect to: the proxy's, or the URL's own."""
    proxy = urllib.request.getproxies().get(parts.scheme, "")
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        # HTTPS_PROXY may lack a scheme: "proxy:3128".
        parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    usual_port = 80 if parts.scheme == "http" else 443
    return parts.hostname or "", parts.port or usual_port


# Remembered: without an answer, each further question for the same host would take 3 s.
@functools.cache
def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _run(argv: Sequence[object], what: str, **options: Any) -> str:
    """Run a program; if its output names a known failure of the network, raise a NetworkError."""
    options["env"] = {**_NO_PROMPT, **options.get("env", {})}
    try:
        return run(argv, what=what, **options)
    except CommandError as error:
        for pattern, meaning in _FAILURES:
            if re.search(pattern, error.tail):
                raise _failed(NetworkError, what, error, meaning) from error
        if re.search(_REFUSAL, error.tail):
            raise _failed(RefusedError, what, error, "A registry or a proxy refuses.") from error
        raise


def _failed(kind: type[NetworkError], what: str, error: CommandError, meaning: str) -> NetworkError:
    return kind(
        f"Could not {what}: the network failed.", tail=error.tail, cause=meaning, remedy=_REMEDY
    )
