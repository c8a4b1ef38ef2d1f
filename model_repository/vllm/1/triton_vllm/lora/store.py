"""Find the LoRA adapter that a request names, and load the current contents of its folder.

A name means its folder's contents, wherever the name comes from. vLLM loads a private copy, under a
name and a number that belong only to these contents. So vLLM takes a changed adapter for another
one, and requests in flight keep the old one. vLLM itself drops the least recently used adapters
(``max_cpu_loras``). It reads one again from the copy when a request needs it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.calls import Calls
from triton_vllm.base.errors import AdapterError, InvalidRequestError, UnavailableError
from triton_vllm.lora.copies import CONFIG_NAME, look

if TYPE_CHECKING:
    from pathlib import Path

    from triton_vllm.base.protocols import EngineClient, Log
    from triton_vllm.lora.config import Adapters
    from triton_vllm.lora.copies import Copies, Copy, File

DIGEST_DIGITS = 16
"""Digits of the digest in vLLM's name for an adapter; ``vllm:lora_requests_info`` shows them."""


@dataclass(frozen=True, eq=False)
class Version:
    """One content of an adapter, or the fact that vLLM could not load it.

    Attributes:
        files: the files at the time of copying. Empty for an adapter on a model hub.
        reloads: how often an operator had asked for a reload before this one was loaded.
        request: vLLM's LoRARequest. None if vLLM could not load the adapter.
        copy: the copy that vLLM reads. It exists as long as this object. None for an adapter on a
            model hub.
    """

    files: tuple[File, ...]
    reloads: int
    request: Any = None
    copy: Copy | None = None


class AdapterStore:
    """The adapters of a model; all methods are called in the engine's event loop.

    Args:
        adapters: the adapters' places.
        copies: makes the copies that vLLM reads.
        make: vLLM's class LoRARequest.
        log: reports each load, and why it failed.
    """

    def __init__(self, adapters: Adapters, copies: Copies, make: Any, log: Log) -> None:
        self._adapters = adapters
        self._copies = copies
        self._make = make
        self._log = log
        self._calls = Calls()
        # One adapter is loaded at a time, as in vLLM.
        self._lock = asyncio.Lock()
        # A file system that hangs blocks only these threads.
        self._looking = ThreadPoolExecutor(2, "lora-look")
        # The last version of each adapter, by its name; in the order of their first loads.
        self._known: dict[str, Version] = {}
        # The last files for which there was no room, and for which this was logged.
        self._too_large: tuple[File, ...] = ()
        # The name in vLLM of each adapter so far, by its number in vLLM.
        self._numbers: dict[int, str] = {}

    async def acquire(self, llm: EngineClient, name: str, *, afresh: bool = False) -> Version:
        """Return the current contents of an adapter's folder, loaded by vLLM.

        Args:
            llm: the engine.
            name: the adapter's name in the request.
            afresh: load the adapter even if its files seem unchanged.

        Raises:
            InvalidRequestError: there is no such adapter.
            UnavailableError: the adapter cannot be loaded.
        """
        place = self._adapters.find(name)
        files = await self._look(name, place)
        if afresh or not self._is_known(name, files):
            async with self._lock:
                # While this waited for the lock, the files may have changed, or another request has
                # loaded them.
                files = await self._look(name, place)
                if afresh or not self._is_known(name, files):
                    version = await self._load(llm, name, place, files, afresh=afresh)
                    self._known[name] = version
        version = self._known[name]
        if version.request is None:
            raise _failed(name)
        return version

    def give_up(self) -> None:
        """End the waits for an engine that has died."""
        self._calls.give_up()

    def close(self) -> None:
        """Remove the copies; vLLM must have ended."""
        self._looking.shutdown(wait=False, cancel_futures=True)
        self._copies.close()

    def _is_known(self, name: str, files: tuple[File, ...]) -> bool:
        """Return whether these files of an adapter have been loaded, or could not be loaded."""
        version = self._known.get(name)
        if version is None or version.files != files:
            return False
        # An operator may have asked another instance to load the adapter again.
        return version.reloads == self._copies.reloads(name)

    async def _look(self, name: str, place: Path | str) -> tuple[File, ...]:
        """Return an adapter's files as they are now; empty for one on a model hub.

        They are also empty if a listed adapter lacks some; ``_prepare`` then raises.

        Raises:
            InvalidRequestError: LORA_DIRECTORY has no such adapter.
        """
        # a name on a model hub
        if isinstance(place, str):
            return ()
        # The operator lists an adapter with its path, wherever that is. Any other name comes from a
        # client, and its files must be in LORA_DIRECTORY.
        within = None if name in self._adapters.listed else self._adapters.directory
        files = await asyncio.get_running_loop().run_in_executor(self._looking, look, place, within)
        if not files and within is not None:
            self._known.pop(name, None)
            raise InvalidRequestError(f"LoRA {name} is not supported")
        return files

    async def _load(
        self,
        llm: EngineClient,
        name: str,
        place: Path | str,
        files: tuple[File, ...],
        *,
        afresh: bool,
    ) -> Version:
        """Have vLLM load an adapter; return its version, without a request if vLLM could not.

        Args:
            llm: the engine.
            name: the adapter's name.
            place: its folder, or its name on a model hub.
            files: its files as they were found.
            afresh: whether an operator has asked for a reload, which all instances then do.

        Raises:
            UnavailableError: the adapter could not be loaded now, but may be later.
            Exception: the engine has died.
        """
        began = time.monotonic()
        # Read before the files are. A reload that is asked for meanwhile reads them again.
        reloads = self._copies.reloads(name)
        try:
            # With `afresh`, `note_reload` counts one more below.
            version = await self._prepare(name, place, files, reloads + afresh)
            await self._calls.answer(llm.add_lora(version.request))
            if afresh:
                # The other instances follow. After a failure, all keep what they have.
                self._copies.note_reload(name)
        except AdapterError:
            raise
        except Exception as error:
            # A dead engine says nothing about the adapter.
            if vllm_api.is_dead(llm):
                raise
            self._log.error(
                f"LoRA adapter '{name}' could not be loaded: {type(error).__name__}: {error}"
            )
            # A full disk or a hub may recover with the same files.
            if isinstance(error, OSError) or isinstance(place, str):
                raise _failed(name) from None
            # Remembered without a request, so that the same files are not tried again.
            return Version(files, reloads)
        seconds = time.monotonic() - began
        self._log.info(f"LoRA adapter {version.request.lora_name} was loaded in {seconds:.1f} s")
        return version

    async def _prepare(
        self, name: str, place: Path | str, files: tuple[File, ...], reloads: int
    ) -> Version:
        """Return a version with a copy of the files, which vLLM has not loaded yet.

        An adapter on a model hub needs no copy: vLLM fetches it.

        Raises:
            ValueError: files are missing.
            UnavailableError: there is no room for a copy.
            OSError: the files cannot be copied.
        """
        if isinstance(place, str):
            return Version((), reloads, self._request(name, place))
        if not files:
            raise ValueError(f"{place} has no {CONFIG_NAME} or no weights")
        self._require_room(name, files)
        copy = await self._copies.make(files)
        request = self._request(f"{name}@{copy.digest[:DIGEST_DIGITS]}", str(copy.folder))
        return Version(files, reloads, request, copy)

    def _require_room(self, name: str, files: tuple[File, ...]) -> None:
        """Drop other adapters' copies if that makes room for another one.

        Raises:
            UnavailableError: it would not be enough.
        """
        missing = self._copies.missing(files)
        removable = sum(version.copy.removable for version in self._known.values() if version.copy)
        if 0 < missing <= removable:
            for other in [*self._known]:
                # A copy in use stays: its request holds it.
                if self._copies.missing(files) > 0:
                    del self._known[other]
            missing = self._copies.missing(files)
        if missing <= 0:
            return
        mib = (missing >> 20) + 1
        text = (
            f"LoRA {name} could not be copied: "
            f"the server's folder for temporary files lacks {mib} MiB"
        )
        # Logged once, because clients must not fill the log.
        if files != self._too_large:
            self._too_large = files
            self._log.error(text)
        raise UnavailableError(text)

    def _request(self, version: str, path: str) -> Any:
        """Return vLLM's LoRARequest: its name (``version``), a number made from it, and its path.

        Raises:
            ValueError: another adapter already has this number.
        """
        # The number follows from the contents, so all instances that share an engine have the same.
        # vLLM stores it in a signed 32-bit integer, and 0 is not allowed.
        digest = hashlib.sha256(version.encode()).hexdigest()
        number = int(digest[:8], 16) >> 1 or 1
        # With an equal number, vLLM would serve the other adapter's weights.
        if self._numbers.setdefault(number, version) != version:
            raise ValueError(
                f"it has by chance the number of {self._numbers[number]}; give it another name"
            )
        return self._make(version, number, path)


def _failed(name: str) -> UnavailableError:
    return UnavailableError(f"LoRA {name} could not be loaded; the server's log has the reason")
