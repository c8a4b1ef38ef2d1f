"""An operator has an adapter loaded again, in all instances that share the engine."""

from __future__ import annotations

import asyncio

import pytest

from support.adapters import Folders, Llm, read
from triton_vllm.base.errors import UnavailableError
from triton_vllm.lora import copies


def test_a_reload_through_another_instance_is_one_here_as_well(tmp_path, monkeypatch):
    """Of this adapter only, and once: an operator asks one instance, also because the files seem unchanged."""
    monkeypatch.setattr(copies, "_state", lambda status: (0, 0, 0, 0))
    llm, shared = Llm(), tmp_path / "shared"
    shared.mkdir()
    one, other = (Folders(tmp_path, shared) for _ in range(2))

    async def both(name, **how):
        return read(await one.store.acquire(llm, name, **how)), read(await other.store.acquire(llm, name))

    async def use():
        assert [await both("a"), await both("b")] == [("first", "first"), ("second", "second")]
        one.write("a", "other")
        one.write("b", "thirds")
        assert [await both("a"), await both("b")] == [("first", "first"), ("second", "second")]
        assert await both("a", afresh=True) == ("other", "other")
        loads = len(llm.loads)
        assert [await both("a"), await both("b")] == [("other", "other"), ("second", "second")]
        assert len(llm.loads) == loads

    asyncio.run(use())
    for folders in (one, other):
        folders.store.close()


@pytest.mark.parametrize("failing", ["make", "note_reload"])
def test_a_reload_that_fails_leaves_the_adapter_in_service(tmp_path, monkeypatch, failing):
    """In all instances; a full disk must not take it away."""
    llm, shared = Llm(), tmp_path / "shared"
    shared.mkdir()
    one, other = (Folders(tmp_path, shared) for _ in range(2))

    def fail(_):
        raise OSError(28, "No space left on device")

    async def use():
        versions = [await folders.store.acquire(llm, "a") for folders in (one, other)]
        monkeypatch.setattr(one.copies, failing, fail)
        with pytest.raises(UnavailableError, match="could not be loaded; the server's log has the reason"):
            await one.store.acquire(llm, "a", afresh=True)
        loads = len(llm.loads)
        assert [await folders.store.acquire(llm, "a") for folders in (one, other)] == versions
        assert len(llm.loads) == loads

    asyncio.run(use())
    for folders in (one, other):
        folders.store.close()
