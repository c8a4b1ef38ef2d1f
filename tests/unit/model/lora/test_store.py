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
from triton_vllm.lora.copies import SPARE


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


def test_a_listed_adapter_goes_the_same_way(folders):
    """A name of a hub is vLLM's matter; each is loaded once."""
    llm = Llm()

    async def use():
        for _ in range(2):
            listed, hub = await folders.store.acquire(llm, "listed"), await folders.store.acquire(llm, "hub")
        folders.write("../elsewhere", "other")
        return listed, hub, await folders.store.acquire(llm, "listed")

    listed, hub, changed = asyncio.run(use())
    assert (hub.request.lora_name, hub.request.lora_path) == ("hub", "org/name")
    assert llm.loads == [listed.request.lora_name, "hub", changed.request.lora_name]
    assert [read(version) for version in (listed, changed)] == ["third", "other"]
    assert len({version.request.lora_int_id for version in (listed, hub, changed)}) == 3


def test_a_listed_adapter_that_is_gone_is_the_operators_fault(folders):
    """The client hears no path; the log has it, once."""
    llm = Llm()

    async def use():
        for _ in range(2):
            with pytest.raises(UnavailableError, match=r"^LoRA gone could not be loaded; the server's log has the reason$"):
                await folders.store.acquire(llm, "gone")

    asyncio.run(use())
    (line,) = folders.log.lines
    assert "nowhere has no adapter_config.json or no weights" in line


def test_a_link_out_of_the_directory_is_no_adapter(folders):
    """An operator's own path may lead anywhere, as in a hub's cache."""
    (folders.place / "out").symlink_to(folders.place.parent / "elsewhere")
    weights = folders.place.parent / "elsewhere" / "adapter_model.safetensors"
    weights.rename(folders.place.parent / "blob")
    weights.symlink_to(folders.place.parent / "blob")

    async def use():
        with pytest.raises(InvalidRequestError, match=r"^LoRA out is not supported$"):
            await folders.store.acquire(Llm(), "out")
        return read(await folders.store.acquire(Llm(), "listed"))

    assert asyncio.run(use()) == "third"


def test_a_replaced_adapter_is_seen_by_the_next_request(folders):
    """Under another name and number; the old copy stays until the last request for it has ended."""
    llm = Llm()

    async def use():
        old = await folders.store.acquire(llm, "a")
        folders.write("a", "third")
        return old, await folders.store.acquire(llm, "a")

    old, new = asyncio.run(use())
    assert new.request.lora_name != old.request.lora_name
    assert [llm.held[version.request.lora_int_id] for version in (old, new)] == ["first", "third"]
    assert [read(version) for version in (old, new)] == ["first", "third"]
    del old
    assert folders.copied() == ["third"]


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
    llm, room = Llm(), SPARE + 7  # bytes; an adapter has 7 or 8
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


def test_one_that_can_never_fit_takes_no_other_ones_copy(folders, monkeypatch):
    """Each client could have all adapters copied again, and fill the log."""
    llm, room = Llm(), SPARE + 100
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: SimpleNamespace(free=room - sum(p.stat().st_size for p in Path(folder).glob("*/*")))
    )

    async def use():
        await folders.store.acquire(llm, "a")
        folders.write("b", "x" * (5 << 20))
        for _ in range(3):
            with pytest.raises(UnavailableError, match="lacks 5 MiB"):
                await folders.store.acquire(llm, "b")
        await folders.store.acquire(llm, "a")

    asyncio.run(use())
    assert len(llm.loads) == 1
    assert len([line for line in folders.log.lines if "could not be copied" in line]) == 1


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


def test_who_waited_for_another_load_gets_what_the_folder_holds_then(folders):
    """A folder that was replaced meanwhile is whole, and no reason for a refusal."""
    llm = Llm()

    async def use():
        async with folders.store._lock:  # another adapter is being loaded
            waiting = asyncio.ensure_future(folders.store.acquire(llm, "a"))
            while not folders.store._lock._waiters:  # noqa: ASYNC110 - asyncio's lock tells nobody who waits
                await asyncio.sleep(0)
            folders.write("a", "newer")
        return read(await waiting)

    assert asyncio.run(use()) == "newer"


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


def test_an_engine_that_was_started_again_reads_the_same_copies(folders):
    """vLLM loads an adapter that it does not have with the request that names it, which carries the copy's path."""
    first, second = Llm(), Llm()
    versions = [asyncio.run(folders.store.acquire(llm, "a")) for llm in (first, second)]
    assert versions[0] is versions[1]
    assert (len(first.loads), second.loads, read(versions[1])) == (1, [], "first")


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


@pytest.mark.parametrize("name", ["../a", "a/../b", "a\0", "", "x" * 129])
def test_what_is_no_folders_name_is_not_looked_for(folders, name):
    """Wherever it comes from, an operator included."""
    with pytest.raises(InvalidRequestError, match="is not supported"):
        asyncio.run(folders.store.acquire(Llm(), name, afresh=True))


def test_a_full_disk_is_not_the_adapters_fault(folders, monkeypatch):
    """It is tried again at the next request, and what is being written again, too."""
    llm = Llm()
    errors = [OSError(28, "No space left on device"), UnavailableError("LoRA file x is being written; try again later")]
    make = folders.copies.make

    async def fail_twice(files):
        if errors:
            raise errors.pop(0)
        return await make(files)

    monkeypatch.setattr(folders.copies, "make", fail_twice)

    async def use():
        with pytest.raises(UnavailableError, match="could not be loaded"):
            await folders.store.acquire(llm, "a")
        with pytest.raises(UnavailableError, match="is being written; try again later"):
            await folders.store.acquire(llm, "a")
        return read(await folders.store.acquire(llm, "a"))

    assert asyncio.run(use()) == "first"


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
