"""The place where the instances of one load of a model meet: a private folder with their messages.

Triton starts each instance of a model as its own process, all at the same time and in any order. It
tells no instance about the others. There is a folder for the server, the model, its version and the
group of instances; each load has a folder in it:

    seat-N    locked by instance N as long as it lives; a seat that was left is not taken again
    lead      locked by the instance that has launched the engine
    engine    the addresses of the engine that serves now (JSON); missing while there is no engine
    hung-ID   an instance has found that this engine hangs
    failed    why the load has failed
    closed    the leading instance has been unloaded
    forsaken  why no instance may serve any more
    figures   when each of the engine's ranks made the figures that each instance has (doubles)
    requests  how many requests each instance has in flight; see ``counts``
    sleep     whether the engine sleeps; see ``sleep``
    metrics   the instances' Prometheus metrics, in prometheus_client's own files
    operator  locked by the instance that carries out an operator's request
    adapters  the copies of LoRA adapters that the engine reads, and the requests to load one again;
              see ``lora.copies``

The kernel frees the locks of a process that dies, so nothing here depends on an orderly end of a
process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import tempfile
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from triton_vllm.base import locks
from triton_vllm.base.errors import ConfigError
from triton_vllm.base.processes import process_space, start_time

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_FOLDER_PREFIX = "vllm_env_frontends_"
LONGEST_ADDRESS_BYTES = 107
"""The most bytes of a Unix socket's path (sun_path without its final zero)."""
DEPARTURE_S = 30.0
"""After the leading instance was unloaded, how many seconds each other instance counts as about to
be unloaded, too. Triton ends the instances one after the other, which took up to 10 s each on two
busy cores."""


@dataclass(frozen=True)
class Seat:
    """Which instance of a model this is.

    Attributes:
        index: the instance's number in its group on its device, from 0 on.
        count: the number of these instances.
        key: digest of the server, the model, its version, the group, its count and the device. All
            instances of a load share it.
    """

    index: int
    count: int
    key: str


@dataclass(frozen=True)
class Address:
    """How an instance reaches an engine.

    Attributes:
        engine: the engine's name. A new one after each start.
        client: the instance's number among the engine's clients.
        input_address: where the instance takes a connection.
        output_address: where the instance takes outputs.
        stats_update_address: where data-parallel ranks publish their load. May be None.
    """

    engine: str
    client: int
    input_address: str
    output_address: str
    stats_update_address: str | None


def seat(args: Mapping[str, str], server: int) -> Seat | None:
    """Return an instance's seat; None if it is the only instance of its group on its device.

    Args:
        args: the arguments that Triton passes to ``initialize``.
        server: the process id of tritonserver.

    Raises:
        ConfigError: the instance was added to a loaded model.
    """
    # Triton names an instance after its group, and numbers it: GROUP_0, GROUP_1 ...
    group, _, index = args.get("model_instance_name", "").rpartition("_")
    groups = json.loads(args["model_config"]).get("instance_group") or []
    counts = {entry.get("name"): int(entry.get("count", 1)) for entry in groups}
    count = counts.get(group, 1)
    if not index.isdigit() or (count == 1 and int(index) == 0):
        return None
    if int(index) >= count:
        raise ConfigError(
            "instance_group: an instance cannot be added to a model that is loaded; "
            "unload the model, then load it again"
        )
    names = ("model_repository", "model_name", "model_version", "model_instance_device_id")
    model = [args[name] for name in names]
    # The key contains `count`: after a reload with more instances, the last one would otherwise
    # join an older load that lacks just its seat. The server's start time is in it because a new
    # server may get the process id of an old one.
    identity = json.dumps([process_space(), server, start_time(server), *model, group, count])
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return Seat(index=int(index), count=count, key=key)


class Rendezvous:
    """An instance's place in the folder of its load; ``join`` makes it.

    Args:
        own: which instance this is.
        load: the folder of the load.
        lock: the descriptor that holds the instance's seat.
    """

    def __init__(self, own: Seat, load: Path, lock: int) -> None:
        self._own = own
        self._base = load.parent
        self._load = load
        self._seat = lock
        # The descriptor that holds the lock `lead`; None if this instance does not lead.
        self._lead: int | None = None

    @classmethod
    def join(cls, own: Seat) -> Rendezvous:
        """Take this instance's seat in a load that waits for it, or in a new load.

        Raises:
            ConfigError: no private folder can be made, or its path is too long for a socket.
        """
        home = Path(tempfile.gettempdir())
        base = home / f"{_FOLDER_PREFIX}{own.key}"
        _sweep(home)
        try:
            with _locked(base):
                waiting = (load for load in sorted(base.glob("load-*")) if _waits_for(load, own))
                load = next(waiting, base / f"load-{uuid.uuid4().hex[:6]}")
                load.mkdir(mode=0o700, exist_ok=True)
                joined = cls(own, load, locks.take(load / f"seat-{own.index}", waits=True))
        except OSError as error:
            raise ConfigError(
                f"instance_group: the instances have no folder to meet in: {error}; set TMPDIR"
            ) from None
        # vLLM would notice a path that is too long only after the model has been loaded. This is
        # the longest one that can occur: an engine's name has 6 digits.
        _, longest = _wires(load, "f" * 6, own.count)
        if len(longest) - len("ipc://") > LONGEST_ADDRESS_BYTES:
            joined.leave()
            raise ConfigError(
                "instance_group: the folder for temporary files has too long a name for sockets; "
                "set TMPDIR"
            )
        return joined

    @property
    def leads(self) -> bool:
        """Whether this instance has launched the engine, or must launch it."""
        return self._lead is not None

    def lead(self) -> bool:
        """Begin to lead if no living instance leads; return whether this instance leads."""
        if self._lead is None and not self._is_departing():
            # If another instance leads, its lock cannot be taken.
            with contextlib.suppress(OSError):
                self._lead = locks.take(self._load / "lead")
                # left by the previous leading instance
                for name in ("engine", "closed"):
                    (self._load / name).unlink(missing_ok=True)
        return self.leads

    def wires(self, engine: str) -> list[tuple[str, str]]:
        """Return where the other instances will listen.

        Returns:
            For each client from 1 on, its addresses for requests and for outputs.
        """
        return [_wires(self._load, engine, index) for index in self._others()]

    def publish(self, engine: str, statistics: str | None) -> None:
        """Tell the other instances how to reach the engine that this instance has launched."""
        addresses = {}
        # Number 0 is this instance's own client of the engine.
        for number, index in enumerate(self._others(), start=1):
            address = Address(engine, number, *_wires(self._load, engine, index), statistics)
            addresses[str(index)] = asdict(address)
        new = self._load / "engine.new"
        new.write_text(json.dumps(addresses), encoding="utf-8")
        # A rename, so that no instance reads half of the file.
        new.rename(self._load / "engine")

    def address(self) -> Address | None:
        """Return how this instance reaches the engine that serves now; None without an engine."""
        try:
            addresses = json.loads((self._load / "engine").read_text(encoding="utf-8"))
        except OSError:
            return None
        return Address(**addresses[str(self._own.index)])

    def withdraw(self, engine: str, *, closed: bool) -> None:
        """Remove the published addresses, because the engine ends.

        Args:
            engine: the engine's name.
            closed: whether this instance ends as well.
        """
        # This comes first, so that an instance that finds no engine also finds why.
        if closed:
            (self._load / "closed").touch()
        (self._load / "engine").unlink(missing_ok=True)
        # The engine's sockets are files in this folder.
        for path in self._load.glob(f"{engine}-*"):
            path.unlink(missing_ok=True)

    def closed(self) -> bool:
        """Return whether the leading instance has been unloaded."""
        return (self._load / "closed").exists()

    def report_hung(self, engine: str) -> None:
        """Tell the leading instance that the engine hangs."""
        with contextlib.suppress(OSError):
            (self._load / f"hung-{engine}").touch()

    def is_hung(self, engine: str) -> bool:
        """Return whether another instance has found that the engine hangs."""
        return (self._load / f"hung-{engine}").exists()

    def fail(self, reason: str) -> None:
        """Tell the other instances why the load has failed; the first reason counts."""
        with (
            contextlib.suppress(OSError),
            (self._load / "failed").open("x", encoding="utf-8") as file,
        ):
            file.write(reason)

    def failure(self) -> str:
        """Return why the load cannot succeed; empty if it still can."""
        with contextlib.suppress(OSError):
            reason = (self._load / "failed").read_text(encoding="utf-8")
            # The file exists before its text is written.
            return reason or "another instance has failed"
        # An instance that was killed cannot write a reason.
        first = self._load / "seat-0"
        if first.exists() and not _is_held(first):
            return "the first instance of the model ended while it was loaded"
        return ""

    def has_first(self) -> bool:
        """Return whether the first instance has come."""
        return (self._load / "seat-0").exists()

    def gone(self) -> list[int]:
        """Return the numbers of the instances that have ended."""
        seats = ((index, self._load / f"seat-{index}") for index in self._others())
        return [index for index, seat in seats if seat.exists() and not _is_held(seat)]

    def memory(self, name: str, size: int) -> mmap.mmap:
        """Return ``size`` bytes that the instances share, zero at first.

        Args:
            name: the name of the file.
            size: bytes.

        Raises:
            OSError: there is no room for the file.
        """
        with (self._load / name).open("a+b") as file:
            # Reserved now: if the disk were full later, a write to the mapping would end the
            # process.
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)

    def path(self, name: str) -> Path:
        """Return the path of a file or folder that the instances share."""
        return self._load / name

    def leave(self) -> None:
        """Free the seat; the last instance removes the folder."""
        for lock in (self._seat, self._lead):
            if lock is not None:
                locks.free(lock)
        with contextlib.suppress(OSError), _locked(self._base):
            _tidy(self._base)

    def _is_departing(self) -> bool:
        """Return whether the leading instance was unloaded, and this one probably will be soon.

        It must not start an engine then.
        """
        with contextlib.suppress(OSError):
            closed_at = (self._load / "closed").stat().st_mtime
            return time.time() - closed_at < DEPARTURE_S * self._own.count
        return False

    def _others(self) -> Sequence[int]:
        return [index for index in range(self._own.count) if index != self._own.index]


def _wires(load: Path, engine: str, index: int) -> tuple[str, str]:
    """Return an instance's addresses for requests to an engine, and for outputs of it."""
    return f"ipc://{load}/{engine}-{index}-in", f"ipc://{load}/{engine}-{index}-out"


def _waits_for(load: Path, own: Seat) -> bool:
    """Return whether an instance may join a load: it goes on, and the instance's seat is free."""
    seats = list(load.glob("seat-*"))
    has_ended = (load / "failed").exists() or (load / "closed").exists()
    seat_is_free = not (load / f"seat-{own.index}").exists()
    if has_ended or not seat_is_free:
        return False
    # All its instances must live.
    return bool(seats) and all(map(_is_held, seats))


def _is_held(path: Path) -> bool:
    """Return whether a process holds the lock of a file."""
    try:
        # A lock that can be taken is held by no process.
        locks.free(locks.take(path))
    except OSError:
        return True
    return False


@contextlib.contextmanager
def _locked(base: Path) -> Iterator[None]:
    """Lock a folder, which is made if it is missing, while other processes stay out of it."""
    descriptor = None
    while descriptor is None:
        try:
            with contextlib.suppress(FileExistsError):
                base.mkdir(mode=0o700)
            # Whoever writes to the sockets in this folder gives the engine its requests. With
            # VLLM_ALLOW_INSECURE_SERIALIZATION=1, vLLM even unpickles them, which runs any code. So
            # no other user may write here.
            status = base.lstat()
            if status.st_uid != os.getuid() or status.st_mode & 0o077 or base.is_symlink():
                raise PermissionError(f"{base} is not this user's alone")
            descriptor = locks.take(base / "lock", waits=True)
        except FileNotFoundError:
            # The previous holder has just removed the folder: make it again. But without the folder
            # above it, that would never succeed.
            if not base.parent.is_dir():
                raise
    try:
        yield
    finally:
        locks.free(descriptor)


def _tidy(base: Path) -> None:
    """Remove loads without a living instance, and the folder if no load is left."""
    # The caller has locked the folder, so no instance can join a load meanwhile.
    for load in base.glob("load-*"):
        if not any(map(_is_held, load.glob("seat-*"))):
            shutil.rmtree(load, ignore_errors=True)
    if not any(base.glob("load-*")):
        shutil.rmtree(base, ignore_errors=True)


def _sweep(home: Path) -> None:
    """Remove the folders of instances that were killed together with their server."""
    for base in home.glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(base):
            _tidy(base)
