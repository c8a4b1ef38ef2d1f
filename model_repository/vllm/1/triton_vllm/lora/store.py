"""LoRA adapters that come, change and go while the model serves: the folders directly below the operator's directory.

A request's name finds its adapter at first use. What vLLM loads is a private copy, under a name made of the adapter's and its
contents' digest and under a number of its own: vLLM's prefix cache knows adapters by name, its workers by number, and neither
ever means two contents. A changed adapter is loaded beside the old one, which the requests in flight keep until they end.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.calls import Calls
from triton_vllm.base.coerce import shown
from triton_vllm.base.errors import DEAD, AdapterError, InvalidRequestError, UnavailableError
from triton_vllm.lora import adapter_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from triton_vllm.base.protocols import EngineClient, Log
    from triton_vllm.lora.adapter_files import File

LOOK_S = 1.0
"""For so long what was seen of a folder is taken to be so; a changed one must look the same twice before it is loaded."""
TEND_S = 2.0
"""Between two looks at the folders of the adapters that are loaded."""
DIGITS = 16
"""Of the digest, in the name that vLLM has; `vllm:lora_requests_info` shows it."""


@dataclass(eq=False)
class Version:
    """One content of an adapter, loaded in vLLM.

    Attributes:
        name: the adapter's.
        digest: of its files.
        request: vLLM's LoRARequest.
        users: requests in flight; it is not unloaded while there are any.
        used: when it was last asked for, s.
    """

    name: str
    digest: str
    request: Any
    users: int = 0
    used: float = 0.0


@dataclass(eq=False)
class _Folder:
    """What is known of a name: its files as loaded, as last seen if they differ, and when that was."""

    files: tuple[File, ...] = ()
    version: Version | None = None
    changed: tuple[File, ...] = ()
    failed: tuple[File, ...] = ()
    looked: float = -math.inf


class AdapterStore:
    """The adapters below a directory. All methods are called in the engine's event loop.

    Args:
        directory: the operator's.
        make: vLLM's LoRARequest.
        first: the first number that no other adapter has.
        log: told what is loaded, unloaded, and what could not be.
        clock: seconds.
    """

    def __init__(self, directory: Path, make: Any, first: int, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._make = make
        self._others = first - 1
        self._numbers = itertools.count(first)
        self._log = log
        self._clock = clock
        self._calls = Calls()
        self._lock = asyncio.Lock()  # one is loaded at a time, as in vLLM
        self._llm: EngineClient | None = None
        self._folders: dict[str, _Folder] = {}
        self._versions: dict[tuple[str, str], Version] = {}
        self._tended = -math.inf
        # `gen_vllm_env.sh clean` removes folders of this name that no server uses
        self._copies = tempfile.TemporaryDirectory(prefix="vllm_env_server_lora_", ignore_cleanup_errors=True)

    async def acquire(self, llm: EngineClient, name: str, *, afresh: bool = False) -> Version:
        """Return an adapter, loaded, with one user more; whoever is done with it lowers `users`.

        Args:
            llm: the engine.
            name: from the request.
            afresh: look at the folder now, and take what it holds, however recently that has changed, and nothing else.

        Raises:
            InvalidRequestError: there is no such adapter.
            UnavailableError: it cannot be loaded, or all that vLLM holds are in use.
        """
        self._settle(llm)
        if not adapter_files.is_name(name):
            raise InvalidRequestError(f"LoRA {shown(name)} is not supported")
        folder = self._folders.get(name)
        if afresh or folder is None or folder.version is None or self._clock() - folder.looked > LOOK_S:
            folder = await self._look(llm, name, afresh=afresh)
        version = folder.version
        if version is None or (afresh and folder.changed):
            raise UnavailableError(f"LoRA {name} could not be loaded; the server's log has the reason")
        version.users += 1
        version.used = self._clock()
        return version

    def names(self) -> list[str]:
        """Return the names of the adapters that are loaded."""
        return sorted(name for name, folder in self._folders.items() if folder.version is not None)

    def is_due(self) -> bool:
        """Return whether `tend` should be called; at most every two seconds it is."""
        if not self._versions or self._clock() - self._tended < TEND_S:
            return False
        self._tended = self._clock()
        return True

    async def tend(self, llm: EngineClient) -> None:
        """Load what has changed, and unload what has gone or was replaced and is in use no more."""
        self._settle(llm)
        for name in list(self._folders):
            try:
                await self._look(llm, name)
            except AdapterError:  # gone, or not to be loaded now
                continue
        async with self._lock:
            current = {folder.version for folder in self._folders.values()}
            for version in [v for v in self._versions.values() if v not in current and not v.users]:
                await self._unload(llm, version)

    def give_up(self) -> None:
        """End what waits for an engine that has died."""
        self._calls.give_up()

    def close(self) -> None:
        """Remove the copies; vLLM must have ended."""
        self._copies.cleanup()

    def _settle(self, llm: EngineClient) -> None:
        """Begin anew with an engine that was started again: it has no adapters."""
        if llm is not self._llm:
            self._llm = llm
            for version in self._versions.values():
                shutil.rmtree(version.request.lora_path, ignore_errors=True)
            self._folders.clear()
            self._versions.clear()

    async def _look(self, llm: EngineClient, name: str, *, afresh: bool = False) -> _Folder:
        files = await asyncio.to_thread(adapter_files.look, self._directory, name)
        async with self._lock:
            folder = self._folders.get(name, _Folder())
            if not files:
                self._folders.pop(name, None)
                raise InvalidRequestError(f"LoRA {name} is not supported")
            if folder.version is not None and files == folder.files and not afresh:
                folder.changed = ()
            else:
                # what is being written may be half the old adapter and half the new
                settled = folder.version is None or files == folder.changed or afresh
                folder.changed = files
                if settled and (afresh or files != folder.failed):
                    await self._replace(llm, name, folder, files)
            self._folders[name] = folder
            folder.looked = self._clock()
            return folder

    async def _replace(self, llm: EngineClient, name: str, folder: _Folder, files: tuple[File, ...]) -> None:
        """Load the files; if they cannot be, the old version goes on, and they are not tried again until they change."""
        try:
            folder.version, folder.files = await self._load(llm, name, files), files
            folder.changed = folder.failed = ()
        except (AdapterError, adapter_files.ChangedError) as error:
            if folder.version is not None:  # which serves until a later look
                return
            if isinstance(error, AdapterError):
                raise
            raise UnavailableError(f"LoRA {name} is being written; try again later") from None
        except Exception as error:
            if vllm_api.is_dead(llm):
                raise
            folder.failed = () if isinstance(error, OSError) else files  # a full disk is emptied without a change here
            kept = "; the one from before it was changed goes on" if folder.version else ""
            self._log.error(f"LoRA adapter '{name}' could not be loaded{kept}: {type(error).__name__}: {error}")

    async def _load(self, llm: EngineClient, name: str, files: tuple[File, ...]) -> Version:
        began, number = self._clock(), next(self._numbers)
        copy = Path(self._copies.name, str(number))
        try:
            digest = await asyncio.to_thread(adapter_files.copy, files, copy)
            if llm is not self._llm:
                raise UnavailableError(DEAD)  # noqa: TRY301 - the copy must go, too
            known = self._versions.get((name, digest))
            if known is None:
                await self._make_room(llm, name)
                request = self._make(f"{name}@{digest[:DIGITS]}", number, str(copy))
                await self._calls.answer(llm.add_lora(request))
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)
            raise
        if known is not None:  # only touched
            shutil.rmtree(copy, ignore_errors=True)
            return known
        version = self._versions[name, digest] = Version(name, digest, request)
        self._log.info(f"LoRA adapter {request.lora_name} was loaded in {self._clock() - began:.1f} s")
        return version

    async def _make_room(self, llm: EngineClient, name: str) -> None:
        """Unload the adapter that was not used for longest if vLLM holds no more.

        A replaced one does not count: its requests end, and until then vLLM may read its copy again.
        """
        most = max(vllm_api.adapter_places(llm) - self._others, 1)
        others = [f.version for n, f in self._folders.items() if n != name and f.version is not None]
        if len(others) < most:
            return
        idle = min((version for version in others if not version.users), key=lambda v: v.used, default=None)
        if idle is None:
            raise UnavailableError(
                f"{len(others)} LoRA adapters are in use, as many as this model holds (max_cpu_loras); try again later"
            )
        del self._folders[idle.name]
        await self._unload(llm, idle)

    async def _unload(self, llm: EngineClient, version: Version) -> None:
        del self._versions[version.name, version.digest]
        try:
            await self._calls.answer(llm.remove_lora(version.request.lora_int_id))
        finally:
            shutil.rmtree(version.request.lora_path, ignore_errors=True)
        self._log.info(f"LoRA adapter {version.request.lora_name} was unloaded")
