"""Run the stock tritonserver, from its start until its last process has ended.

    with TritonServer(binary, repository, log=Path("server.log")) as server:
        ask(server.grpc_url)

The server listens only on free ports of 127.0.0.1. When the block ends, also by an exception or
Ctrl-C, every process that the server started is ended. Its shared memory and the environment that
it extracted to ``/tmp`` are removed.
"""

import contextlib
import itertools
import random
import re
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from vllm_env.base import report
from vllm_env.base.errors import CommandError
from vllm_env.base.interrupts import interrupts_held
from vllm_env.base.network import require_loopback
from vllm_env.base.process import Child, grouped, has_ended, start
from vllm_env.triton.root import backend_arguments

from . import identity, leftovers, processes, server_log
from .plain_paths import plain_repository, plain_temporary

# Below Linux's ephemeral ports: while models load, no outgoing connection takes one.
_PORTS = range(10240, 32768)
_POLL_SECONDS = 0.25
# Between two notes of the process tree. A walk through /proc takes a few ms.
_LOOK_SECONDS = 2.0
# tritonserver gives its models 30 s (--exit-timeout-secs).
_EXIT_SECONDS = 45.0
# Stubs and engines notice within seconds that the server is gone.
_LEAVE_SECONDS = 5.0
# Between SIGTERM and SIGKILL.
_GRACE_SECONDS = 3.0
# Linux keeps POSIX shared memory there.
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
_EXTRACTED = re.compile(r"python_env_\w{6}")
# Texts of starts that failed through no fault of the model. On a busy machine, 24.10 sometimes
# reads a wrong handle from shared memory, and the server aborts (server issues 5949, 8882).
_KNOWN_CRASH = "boost::interprocess::lock_exception"
# The machine paused (triton_vllm/startup/abandoned.py), also twice in a row.
_GIVEN_UP = "the server has given this load up"
# Another program took a port after free_ports() had found it free.
_PORT_TAKEN = "already in use"


@dataclass(frozen=True)
class Ports:
    """Loopback ports of one server."""

    http: int
    grpc: int
    metrics: int


class StuckStartError(CommandError):
    """The server did not start, without a fault of the model: it crashed, hung or lost a port.

    Another start may work.
    """


@dataclass(frozen=True)
class Launch:
    """The options of a server's start.

    Attributes:
        environment: added to this process's variables; an empty value removes a variable.
        arguments: further arguments for tritonserver.
        ready_timeout: the models must be ready within this time (s).
        stall_timeout: a start whose log is silent for this time (s) counts as stuck; None waits on.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    ready_timeout: float = 300.0
    stall_timeout: float | None = None


class TritonServer:
    """A running tritonserver, as a context manager. The block begins when the models are ready.

    A start that gets stuck through a known fault of Triton is tried again; so is one whose ports
    another program has taken, with other ports.

    Args:
        binary: the tritonserver program of a Triton root.
        repository: the model repository.
        log: receives the output of the server and its children, after its old content.
        launch: options of the start.
    """

    def __init__(
        self, binary: Path, repository: Path, *, log: Path, launch: Launch | None = None
    ) -> None:
        self.binary = binary
        self.repository = repository
        self.log = log
        self.ports = free_ports()
        self.leftovers: tuple[psutil.Process, ...] = ()
        """After the stop: processes that did not end by themselves and had to be ended."""
        self._id = uuid.uuid4().hex
        self.name = f"vllm_env_{self._id}"
        """The name that the server tells to its clients."""
        self._launch = launch or Launch()
        self._child: Child | None = None
        self._until_stopped = contextlib.ExitStack()
        # What _look() has found: the server's processes, their files, and its dead children.
        self._known: set[psutil.Process] = set()
        self._traces: set[Path] = set()
        self._dead: frozenset[int] = frozenset()
        self._has_dead_stub = False
        self._looked = 0.0  # time.monotonic()
        # The last start.
        self._started = 0.0  # time.time()
        self._failed = False
        self._scratch: Path | None = None
        self._log_start = 0  # bytes that were in the log before

    @property
    def http_url(self) -> str:
        """Return the address of the HTTP frontend, ``http://127.0.0.1:PORT``."""
        return f"http://127.0.0.1:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        """Return the address of the gRPC frontend, ``127.0.0.1:PORT``."""
        return f"127.0.0.1:{self.ports.grpc}"

    @property
    def pid(self) -> int:
        """Return the server's process id; 0 before the start."""
        return self._child.pid if self._child else 0

    @property
    def running(self) -> bool:
        """Return whether the server's process is running."""
        return self._child is not None and self._child.poll() is None

    # Self is not in the typing of Python 3.10.
    def __enter__(self) -> "TritonServer":  # noqa: PYI034
        """Start the server and wait until its models are ready; try again if a start gets stuck."""
        for attempt in itertools.count(1):
            try:
                self.start()
                self.wait_ready()
                break
            # An interrupt, too, must end the server.
            except BaseException as error:
                self.stop()
                most_attempts = 4 if self._has_logged(_GIVEN_UP) else 2
                may_succeed = isinstance(error, StuckStartError)
                if attempt >= most_attempts or not may_succeed:
                    raise
                self.ports = free_ports()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the program and return at once.

        Raises:
            CommandError: the program cannot be started.
        """
        self._started = time.time()
        self._failed = True  # until the models are ready
        self._has_dead_stub = False
        # A process id of the first attempt may come again.
        self._dead = frozenset()
        # The server gets its own folder for temporary files: vLLM leaves one socket there for each
        # engine that it starts.
        self._scratch = Path(tempfile.mkdtemp(prefix="vllm_env_server_", dir=plain_temporary()))
        variables = {
            **self._launch.environment,
            "TMPDIR": str(self._scratch),
            processes.MARKER_VARIABLE: self._id,
        }
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as sink:
            self._log_start = sink.tell()
            try:
                # An interrupt waits until stop() knows the child.
                with interrupts_held():
                    # SIGTERM and not SIGKILL: on a clean exit, the server removes the environment
                    # that it extracted.
                    argv = self._command(self._scratch)
                    self._child = start(
                        argv, stdout=sink, env=variables, when_parent_ends=signal.SIGTERM
                    )
                    self._until_stopped.enter_context(grouped(self._child))
            except OSError as error:
                raise CommandError(
                    f"{self.binary} does not start: {error.strerror}.",
                    remedy="Give a Triton root whose bin/tritonserver can be run here.",
                ) from error

    def _command(self, scratch: Path) -> list[str]:
        """Return tritonserver's command line; ``scratch`` may get a link to the repository."""
        return [
            str(self.binary),
            *backend_arguments(self.binary),
            f"--model-repository={plain_repository(self.repository, scratch)}",
            f"--id={self.name}",
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
            "--metrics-address=127.0.0.1",
            f"--http-port={self.ports.http}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-port={self.ports.metrics}",
            # The name shows later which shared memory was this server's.
            f"--backend-config=python,shm-region-prefix-name={self._shared_memory_prefix}",
            *self._launch.arguments,
        ]

    @property
    def _shared_memory_prefix(self) -> str:
        return f"vllm_env_{self._id[:12]}_"

    def wait_ready(self) -> None:
        """Wait until all models are ready.

        Raises:
            CommandError: the server ends or takes too long; ``cause`` or ``tail`` says why.
        """
        started = time.monotonic()
        while not self._is_ready():
            elapsed = time.monotonic() - started
            self._require_progress(elapsed)
            report.step(f"tritonserver loads, {elapsed:.0f} s")
            self._look()
            time.sleep(_POLL_SECONDS)
        self._failed = False
        self._look(now=True)

    def _is_ready(self) -> bool:
        """Return whether this server answers on its ports and is ready.

        Raises:
            StuckStartError: another server answers there. This one could not bind its ports.
        """
        questions = {self.ports.http: identity.http_name, self.ports.grpc: identity.grpc_name}
        for port, ask in questions.items():
            name = ask(port)
            # Nothing answers there yet.
            if name is None:
                return False
            if name != self.name:
                raise self._failure(
                    f"Another server answers on port {port}, which this tritonserver was to use.",
                    is_stuck=True,
                )
        return identity.is_ready(self.ports.http) and self.running

    def _require_progress(self, elapsed: float) -> None:
        """Raise a CommandError if the start, ``elapsed`` seconds old, has failed or takes too long.

        It is a StuckStartError if another start may succeed.
        """
        # 1) The server has ended.
        if not self.running:
            status = self._child.returncode if self._child else None
            has_crashed = status == -signal.SIGABRT and self._has_logged(_KNOWN_CRASH)
            could_not_load = self._has_logged(_GIVEN_UP) or self._has_logged(_PORT_TAKEN)
            raise self._failure(
                f"tritonserver ended with status {status} before its models were ready.",
                is_stuck=has_crashed or could_not_load,
            )
        # 2) The server runs, but waits in vain.
        if self._has_dead_stub:
            raise self._failure(
                "The model's stub ended at its start, and tritonserver would wait for it for ever.",
                is_stuck=self._has_logged(_KNOWN_CRASH) or self._has_logged(_GIVEN_UP),
            )
        # 3) It takes too long.
        if elapsed > self._launch.ready_timeout:
            raise self._failure(f"tritonserver was not ready after {elapsed:.0f} s.")
        stall_timeout = self._launch.stall_timeout
        # The log may be older than this start.
        silent = min(elapsed, server_log.silent_seconds(self.log))
        if stall_timeout is not None and silent > stall_timeout:
            raise self._failure(
                f"tritonserver was not ready and said nothing for {silent:.0f} s.", is_stuck=True
            )

    def _has_logged(self, text: str) -> bool:
        """Return whether the log of the last start has a text."""
        return text in server_log.read(self.log, start=self._log_start)

    def _failure(self, what: str, *, is_stuck: bool = False) -> CommandError:
        """Return the error for a failed start, with the reason and lines that the log has."""
        error_class = StuckStartError if is_stuck else CommandError
        reason, tail = server_log.load_failure(self.log, start=self._log_start)
        whole = f"The whole log is {self.log}."
        if reason:
            # The reason is the last line that the user reads, so the log is named before it.
            return error_class(f"{what} {whole}", tail=tail, cause=reason)
        return error_class(what, tail=tail, remedy=whole)

    def _look(self, *, now: bool = False) -> None:
        """Note the processes, and their files in /tmp and /dev/shm, while their parents live."""
        is_recent = time.monotonic() - self._looked < _LOOK_SECONDS
        if is_recent and not now:
            return
        self._looked = time.monotonic()
        group = self.members()
        self._known.update(group)
        self._traces |= processes.traces(group)
        # The server waits at once for a stub that it ended or whose death it noticed. It does not
        # notice a stub that dies before its first message, for example because of missing
        # libraries (seen with 24.10). Such a stub is dead at two looks.
        before = self._dead
        self._dead = processes.dead_children(self.pid)
        self._has_dead_stub = bool(before & self._dead)

    def members(self) -> list[psutil.Process]:
        """Return the server's living processes: itself, the stubs, and those of vLLM."""
        return processes.members(self.pid, self._id, self._known) if self._child else []

    def kill(self) -> None:
        """End the server's process at once. Its stubs and engines notice it and end, too.

        Use it before :meth:`stop` if no client waits for an answer: a clean exit takes 3 s.
        """
        # Afterwards its children have another parent.
        self._look(now=True)
        if self._child:
            self._child.kill()

    def stop(self) -> None:
        """End the server and remove its leftovers.

        After a crash or a kill, the stubs get a moment to notice that the server is gone.
        """
        if self._child is None:
            self._remove_traces()
            return
        try:
            self._look(now=True)
            if self._child.poll() is None:
                self._child.send_signal(signal.SIGTERM)
                has_ended(self._child, _EXIT_SECONDS)  # waits
            self.leftovers = tuple(processes.wait_gone(self.members(), timeout=_LEAVE_SECONDS))
        finally:
            processes.end(self.members(), grace=_GRACE_SECONDS)
            self._child.wait()
            self._child = None
            self._until_stopped.close()
            self._remove_traces()

    def _remove_traces(self) -> None:
        """Delete the extracted environments, the shared memory and the temporary files."""
        # A stub that dies at once is gone before a look finds the environment that it was given.
        # So take those that were extracted since this start and that no process uses.
        if self._failed:
            extracted = (Path("/tmp"), _EXTRACTED)  # noqa: S108
            for entry in leftovers.find_abandoned((extracted,)):
                if entry.path.stat().st_ctime >= self._started:
                    self._traces.add(entry.path)
        if self._scratch:
            self._traces.add(self._scratch)
        regions = _SHARED_MEMORY.glob(f"{self._shared_memory_prefix}*")
        for path in (*self._traces, *regions):
            leftovers.delete(path)


def free_ports() -> Ports:
    """Return three ports of 127.0.0.1 on which no program listens.

    Raises:
        VllmEnvError: fewer than three ports are free, or the loopback interface does not work.
    """
    require_loopback()
    free: list[int] = []
    # In random order, so that servers that start at the same time rarely choose the same ports.
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            # A port counts as free although connections of an ended server linger in TIME_WAIT.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            free.append(port)
        if len(free) == 3:
            return Ports(*free)
    raise CommandError(
        "No free port is left on 127.0.0.1.", remedy="End the programs that listen there."
    )
