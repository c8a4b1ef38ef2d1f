"""A name means what its folder holds when a request asks for it, wherever the name comes from."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.adapters import Folders, Llm, read
from triton_vllm.base.errors import DEAD, InvalidRequestError, UnavailableError
from triton_vllm.lora import store
from triton_vllm.lora.copies import SPARE_BYTES


def test_an_adapter_is_loaded_once(folders):
    """At first use, from a copy, under a name of its own, by as many requests as come at once."""
    llm = Llm()

    async def use():
        return await asyncio.gather(*(folders.store.acquire(llm, "a") for _ in range(5)))

    (version,) = set(asyncio.run(use()))
    assert llm.loads == [version.request.lora_name]
    assert llm.held == {version.request.lora_int_id: "first"}
    assert version.request.lora_name.startswith("a@")
    assert Path(version.request.lora_path).parent == folders.copies._folder
    assert asyncio.run(folders.store.acquire(llm, "a")) is version
    assert len(llm.loads) == 1


def test_touching_an_adapter_changes_nothing_for_vllm(folders):
    """The same contents have the same name, number and path, so that cached prefixes stay good."""
    llm = Llm()

    async def use():
        old = await folders.store.acquire(llm, "a")
        folders.write("a", "first")
        return old, await folders.store.acquire(llm, "a")

    old, new = asyncio.run(use())
    assert old.files != new.files
    assert old.request == new.request
    assert folders.copied() == ["first"]


def test_an_adapter_whose_folder_is_gone_is_refused(folders):
    """With the text for an unknown name; requests in flight keep its copy."""
    llm = Llm()

    async def use():
        version = await folders.store.acquire(llm, "a")
        shutil.rmtree(folders.place / "a")
        with pytest.raises(InvalidRequestError, match=r"^LoRA a is not supported$"):
            await folders.store.acquire(llm, "a")
        return version

    version = asyncio.run(use())
    assert read(version) == "first"
    del version
    assert folders.copied() == []


def test_what_no_request_uses_makes_room(folders, monkeypatch):
    """If that is not enough, the refusal says how much space is missing."""
    llm, room = Llm(), SPARE_BYTES + 7  # bytes; an adapter has 7 or 8
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: SimpleNamespace(free=room - sum(p.stat().st_size for p in Path(folder).glob("*/*")))
    )

    async def use():
        await folders.store.acquire(llm, "a")
        used = await folders.store.acquire(llm, "listed")
        assert folders.copied() == ["third"]
        folders.write("b", "x" * (5 << 20))
        with pytest.raises(UnavailableError, match=r"^LoRA b could not be copied: .* lacks 6 MiB$"):
            await folders.store.acquire(llm, "b")
        assert read(used) == "third"

    asyncio.run(use())
    assert "LoRA b could not be copied" in folders.log.lines[-1]


def test_a_hub_that_did_not_answer_is_asked_again(folders, monkeypatch):
    """No file of ours tells that it answers now."""
    llm = Llm()

    async def fail(request):
        raise ConnectionError("no hub") if request.lora_name == "hub" else AssertionError

    monkeypatch.setattr(llm, "add_lora", fail)

    async def use():
        with pytest.raises(UnavailableError, match="LoRA hub could not be loaded"):
            await folders.store.acquire(llm, "hub")
        monkeypatch.undo()
        return await folders.store.acquire(llm, "hub")

    assert asyncio.run(use()).request.lora_path == "org/name"


def test_a_broken_adapter_is_refused_and_tried_once(folders):
    """The client hears no internals, the log has the reason; it is tried again when its files change, or an operator asks."""
    llm = Llm()

    async def refuse(name, **how):
        with pytest.raises(UnavailableError, match=rf"^LoRA {name} could not be loaded; the server's log has the reason$"):
            await folders.store.acquire(llm, name, **how)

    async def use():
        folders.write("b", "broken")
        await refuse("b")
        await refuse("b")
        assert len(llm.loads) == 1
        await refuse("b", afresh=True)
        assert len(llm.loads) == 2
        await folders.store.acquire(llm, "a")
        folders.write("a", "broken")
        await refuse("a")
        folders.write("b", "mended")
        return read(await folders.store.acquire(llm, "b"))

    assert asyncio.run(use()) == "mended"
    assert ["no such layer" in line for line in folders.log.lines if "could not be loaded" in line] == [True] * 3
    assert folders.copied() == ["mended"]


def test_nobody_waits_for_an_engine_that_has_died(folders):
    """EngineCore tells those who wait for an answer nothing when it dies."""
    llm = Llm()

    async def use():
        llm.hangs = asyncio.Event()
        waiting = asyncio.ensure_future(folders.store.acquire(llm, "a"))
        await llm.hangs.wait()
        folders.store.give_up()
        with pytest.raises(UnavailableError, match=DEAD):
            await waiting
        llm.hangs = None
        await folders.store.acquire(llm, "b")  # the lock is free

    asyncio.run(use())
    assert list(llm.held.values()) == ["second"]


def test_a_dead_engine_says_nothing_of_an_adapter(folders):
    """What it raises is the engine's reason, and the adapter is tried with the next one."""
    dead, alive = Llm(), Llm()

    async def use():
        dead.errored = True
        folders.write("a", "broken")
        with pytest.raises(ValueError, match="no such layer"):
            await folders.store.acquire(dead, "a")
        assert folders.log.lines == []
        with pytest.raises(UnavailableError):
            await folders.store.acquire(alive, "a")

    asyncio.run(use())
    assert len(alive.loads) == 1


def test_instances_mean_one_adapter_by_one_name_number_and_path(tmp_path):
    """vLLM loads it once for all, and its prefix cache serves them all; another content is another adapter in each."""
    (tmp_path / "shared").mkdir()
    one, other = (Folders(tmp_path, tmp_path / "shared") for _ in range(2))
    llm: Any = Llm()

    async def use():
        requests = []
        for weights in ("first", "third"):
            one.write("a", weights)
            found = await asyncio.gather(one.store.acquire(llm, "a"), other.store.acquire(llm, "a"))
            requests.append(found[0].request)
            assert found[0].request == found[1].request
        old = other.store._known["a"]
        one.store.close()
        return requests, read(old)

    requests, text = asyncio.run(use())
    assert llm.held == {request.lora_int_id: weights for request, weights in zip(requests, ("first", "third"), strict=True)}
    assert text == "third"


def test_two_adapters_never_have_one_number(folders, monkeypatch):
    """A number has few bits: one that is taken is refused, as vLLM would serve the other adapter's weights."""
    monkeypatch.setattr(store, "hashlib", SimpleNamespace(sha256=lambda _: SimpleNamespace(hexdigest=lambda: "1" * 64)))

    async def use():
        llm = Llm()
        first = await folders.store.acquire(llm, "a")
        with pytest.raises(UnavailableError, match="LoRA b could not be loaded"):
            await folders.store.acquire(llm, "b")
        return first, llm

    first, llm = asyncio.run(use())
    assert llm.held == {first.request.lora_int_id: "first"}
    assert "it has by chance the number of a@" in folders.log.lines[-1]
