"""Start EngineCore's interpreter early, so that it imports vLLM while this process does.

Where vLLM starts EngineCore as a new interpreter (multiprocessing's "spawn", as on a CPU), that
interpreter imports vLLM again. vLLM starts it only when the engine's configuration exists, so the
second import begins after the first.

The early interpreter must have the variables that vLLM gives to EngineCore: some take effect only
at the start of a process, such as LD_PRELOAD. vLLM chooses them after its import. So this module
notes which variables were changed, and uses them at the next start. If the variables differ this
time, vLLM's own process is started as usual.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from multiprocessing import context, popen_fork, popen_forkserver, reduction, spawn, util
from multiprocessing import resource_tracker as tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_vllm.startup.cause import PATH_VARIABLE
from triton_vllm.startup.inspector import cache_root
from triton_vllm.startup.warm_cache import vllm_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# What EngineCore imports with one worker inside. A vLLM that lacks one of them imports the rest.
MODULES = ("vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor")
CPU_MODULES = ("vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner")
"""Only without a GPU: nobody tries these modules with vLLM's build for one."""
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri")
# The name that vLLM gives the process is "EngineCore", or "EngineCore_DP0" with data parallelism.
_CORE = "EngineCore"
_WAITING = Path(__file__).with_name("waiting_core.py")
# The value is another one at each start. The interpreter that waits follows it later.
_LATE = (PATH_VARIABLE,)
_PREFIX = "{prefix}"
# No note, a damaged one, or a user without a home (RuntimeError)
_UNUSABLE = (OSError, ValueError, TypeError, AttributeError, KeyError, RuntimeError)

# Of other models; the oldest goes.
_MOST_NOTES = 20
_ANY = "any"

Changes = dict[str, "str | None"]
"""Variables that a load sets, with their values; None for one that it removes."""


class Waiting:
    """An interpreter that waits to become EngineCore.

    Args:
        environment: its variables.
        modules: what it imports meanwhile.
    """

    def __init__(self, environment: Mapping[str, str], modules: tuple[str, ...]) -> None:
        self.command = spawn.get_command_line()
        self._environment = dict(environment)
        self._owner = os.getpid()
        self.socket, theirs = socket.socketpair()
        command = [*self.command, str(theirs.fileno()), *modules]
        # Else multiprocessing's own program for a spawned process
        command[command.index("-c") + 1] = _WAITING.read_text(encoding="utf-8")
        with theirs:
            self.process = subprocess.Popen(
                command, env=self._environment, pass_fds=(theirs.fileno(),)
            )

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Return whether this process may become one that vLLM would start with these variables."""
        # A fork of this process is not its parent. And vLLM replaces the program to bind a process
        # to a NUMA node.
        is_parent = os.getpid() == self._owner
        is_same_program = spawn.get_command_line() == self.command
        is_same = _lasting(environment) == _lasting(self._environment)
        return is_parent and is_same_program and is_same and self.process.poll() is None

    def send(self, descriptors: list[Any], environment: Mapping[str, str], data: bytes) -> None:
        """Send what this process needs to become EngineCore; see ``waiting_core.py``.

        Raises:
            OSError: it has ended.
        """
        variables = json.dumps(dict(environment)).encode()
        # Without a signal if it has ended: SIGPIPE would end this process, too.
        quiet = socket.MSG_NOSIGNAL
        length = len(variables).to_bytes(8, "big")
        socket.send_fds(self.socket, [length], descriptors, quiet)
        self.socket.sendall(variables, quiet)
        self.socket.sendall(data, quiet)

    def end(self) -> None:
        """End the process at once."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


class _Popen(popen_fork.Popen):
    """multiprocessing's handle of a spawned process, for one that waits.

    Args:
        process: the process to become.
        waiting: the interpreter that waits.
    """

    method = "spawn"
    # A pickled descriptor is an index in the list of those that are sent.
    DupFd = popen_forkserver._DupFd  # noqa: SLF001

    def __init__(self, process: Any, waiting: Waiting) -> None:
        self._waiting = waiting
        self._descriptors: list[int] = []
        super().__init__(process)

    def duplicate_for_child(self, fd: int) -> int:
        """Have a descriptor sent, and return what stands for it in a pickle."""
        self._descriptors.append(fd)
        return len(self._descriptors) - 1

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, or None while the process runs; wait for it if ``flag`` is 0."""
        process = self._waiting.process
        self.returncode = process.poll() if flag else process.wait()
        return self.returncode

    def _launch(self, process_obj: Any) -> None:
        preparation = spawn.get_preparation_data(process_obj.name)
        data = io.BytesIO()
        own: Any = self
        context.set_spawning_popen(own)
        try:
            reduction.dump(preparation, data)
            reduction.dump(process_obj, data)
        finally:
            context.set_spawning_popen(None)
        descriptors = [tracker.getfd(), *self._descriptors]
        self._waiting.send(descriptors, os.environ, data.getvalue())
        self.pid = self._waiting.process.pid
        # It can be read as soon as the process has ended.
        self.sentinel = self._waiting.socket.fileno()
        self.finalizer = util.Finalize(self, self._waiting.socket.close)


class HeadStart:
    """Starts an interpreter ahead, and lets vLLM use it.

    Make it before vLLM is imported.

    Args:
        environment: the variables of this process.
        model: the model's configuration, which may decide about variables.
    """

    def __init__(self, environment: Mapping[str, str], model: str = "") -> None:
        self._before = dict(environment)
        self._model = hashlib.sha256(model.encode()).hexdigest()[:16]
        self._waiting: Waiting | None = None
        with contextlib.suppress(*_UNUSABLE):
            notes = _read(_file(environment))
            # The first start of a model goes by that of another one.
            changes = notes[self._model if self._model in notes else _ANY]
            _require_libraries(changes)
            self._waiting = Waiting(_with(self._before, changes), modules())

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let vLLM use the interpreter for the first EngineCore that it spawns in this block."""
        process: Any = context.SpawnProcess
        start: Callable[[Any], Any] = process._Popen  # noqa: SLF001

        def started(spawned: Any) -> Any:
            # With data parallelism, vLLM starts a coordinator first.
            if not spawned.name.startswith(_CORE):
                return start(spawned)
            # Later processes start as usual.
            process._Popen = staticmethod(start)  # noqa: SLF001
            self._remember()
            return self._become(spawned) or start(spawned)

        process._Popen = staticmethod(started)  # noqa: SLF001
        try:
            yield
        finally:
            process._Popen = staticmethod(start)  # noqa: SLF001

    def _become(self, spawned: Any) -> Any:
        waiting = self._waiting
        if waiting is None or not waiting.suits(os.environ):
            return None
        try:
            popen = _Popen(spawned, waiting)
        # It has just ended.
        except OSError:
            return None
        self._waiting = None
        return popen

    def _remember(self) -> None:
        """Note which variables were changed, for the next start."""
        changes = _changes(self._before, os.environ)
        # Without the note, the next start is only slower.
        with contextlib.suppress(OSError, RuntimeError):
            file = _file(self._before)
            notes: dict[str, Changes] = {}
            with contextlib.suppress(*_UNUSABLE):
                notes = _read(file)
            if (notes.get(self._model), notes.get(_ANY)) != (changes, changes):
                # The newest comes last.
                others = {name: note for name, note in notes.items() if name != self._model}
                kept = dict(list(others.items())[-_MOST_NOTES:])
                _write(file, {**kept, _ANY: changes, self._model: changes})

    def close(self) -> None:
        """End the interpreter if vLLM has not used it."""
        waiting = self._waiting
        self._waiting = None
        if waiting is not None:
            waiting.end()


def modules() -> tuple[str, ...]:
    """Return what EngineCore will import on this machine."""
    has_gpu = any(Path(device).exists() for device in _GPUS)
    return MODULES if has_gpu else (*MODULES, *CPU_MODULES)


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _LATE}


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> Changes:
    names = sorted(_lasting({**before, **after}))
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def _with(before: Mapping[str, str], changes: Changes) -> dict[str, str]:
    changed = {**before, **changes}
    return {name: value for name, value in changed.items() if value is not None}


def _file(environment: Mapping[str, str]) -> Path:
    """Return the file with the variables that were changed at the last start of each model.

    It is among vLLM's caches, so ``--warm`` ships it.
    """
    return cache_root(environment) / "triton_vllm" / f"core-{vllm_version()}.json"


def _read(file: Path) -> dict[str, Changes]:
    """Return the changes by model.

    Raises:
        OSError: there is no file, or it cannot be read.
        ValueError: it is damaged.
        TypeError: it has another format.
    """
    text = file.read_text(encoding="utf-8").replace(_PREFIX, _in_json(sys.prefix))
    notes: dict[str, Changes] = json.loads(text)
    return {**notes}


def _require_libraries(changes: Changes) -> None:
    """Raise FileNotFoundError if a library is missing; the loader would report it in the log."""
    for library in (changes.get("LD_PRELOAD") or "").split(":"):
        if library and not Path(library).exists():
            raise FileNotFoundError(library)


def _write(file: Path, notes: Mapping[str, Changes]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # An environment may have another folder at each start.
    text = json.dumps(notes, indent=2).replace(_in_json(sys.prefix), _PREFIX)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    new.replace(file)


def _in_json(text: str) -> str:
    return json.dumps(text)[1:-1]
