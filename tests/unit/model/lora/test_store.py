"""LoRA adapters of a directory are loaded, replaced and unloaded while requests use them."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.engine_parts import Log
from triton_vllm.base.errors import DEAD, InvalidRequestError, UnavailableError
from triton_vllm.lora import adapter_files
from triton_vllm.lora.adapter_files import ChangedError
from triton_vllm.lora.store import LOOK_S, AdapterStore


def read(folder):
    return Path(folder, "adapter_model.safetensors").read_text()


class Llm:
    """In place of AsyncLLM: knows which adapters it has, and what it has read of each."""

    def __init__(self, places=2):
        self.vllm_config = SimpleNamespace(lora_config=SimpleNamespace(max_cpu_loras=places))
        self.errored = False
        self.held = {}
        self.hangs = None

    async def add_lora(self, request):
        if self.hangs is not None:
            self.hangs.set()
            await asyncio.Event().wait()
        weights = read(request.path)
        if weights == "broken":
            raise ValueError("no such layer in /secret/place")
        self.held[request.number] = weights

    async def remove_lora(self, number):
        del self.held[number]


class Folders:
    """The operator's directory, with a clock that only the test moves."""

    def __init__(self, place):
        self.place, self.now, self.log = place, 0.0, Log()
        self.store = AdapterStore(place, self.make, 3, self.log, lambda: self.now)

    @staticmethod
    def make(name, number, path):
        return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path, number=number, path=path)

    def write(self, name, weights):
        (self.place / name).mkdir(exist_ok=True)
        (self.place / name / "adapter_config.json").write_text("{}")
        (self.place / name / "adapter_model.safetensors").write_text(weights)

    def remove(self, name):
        for path in (self.place / name).iterdir():
            path.unlink()

    def copies(self):
        return {p.name for p in Path(self.store._copies.name).iterdir()}


@pytest.fixture
def folders(tmp_path):
    """Adapters `a` and `b`."""
    made = Folders(tmp_path)
    made.write("a", "first")
    made.write("b", "second")
    yield made
    made.store.close()
    assert not Path(made.store._copies.name).exists()


def test_an_adapter_is_loaded_once_and_has_its_users(folders):
    """At first use, from a copy, with a number and a name of its own, by as many requests as come at once."""
    llm = Llm()

    async def use():
        return await asyncio.gather(*(folders.store.acquire(llm, "a") for _ in range(5)))

    used = asyncio.run(use())
    (version,) = set(used)
    assert version.users == 5
    assert llm.held == {3: "first"}
    assert version.request.lora_name.startswith("a@")
    assert Path(version.request.lora_path).parent == Path(folders.store._copies.name)
    assert folders.store.names() == ["a"]


def test_a_replaced_adapter_serves_what_is_in_flight_until_it_ends(folders):
    """A new number and a new name for the new contents; the old ones are unloaded when nobody uses them, not before."""
    llm, store = Llm(places=1), folders.store

    async def use():
        old = await store.acquire(llm, "a")
        folders.write("a", "third")
        assert await store.acquire(llm, "a") is old  # it was looked at a moment ago
        folders.now += 2 * LOOK_S
        assert await store.acquire(llm, "a") is old  # it may be half written
        folders.now += 2 * LOOK_S
        new = await store.acquire(llm, "a")
        assert new.request.lora_name != old.request.lora_name
        assert llm.held == {3: "first", 4: "third"}
        old.users -= 3
        await store.tend(llm)
        assert llm.held == {4: "third"}
        assert folders.copies() == {"4"}
        return new

    assert asyncio.run(use()).users == 1


def test_touching_an_adapter_loads_nothing(folders):
    """The same contents are the same version, whose cached prefixes stay good."""
    llm, store = Llm(), folders.store

    async def use():
        old = await store.acquire(llm, "a")
        folders.write("a", "first")
        return old, await store.acquire(llm, "a", afresh=True)

    old, new = asyncio.run(use())
    assert new is old
    assert llm.held == {3: "first"}
    assert folders.copies() == {"3"}


def test_an_operator_has_the_contents_looked_at(folders, monkeypatch):
    """Also where a file system tells of no change: `load_lora` replaces it now."""
    same = {name: adapter_files.look(folders.place, name) for name in ("a", "b")}

    async def run():
        llm = Llm()
        version = await folders.store.acquire(llm, "a")
        folders.write("a", "other")
        monkeypatch.setattr(adapter_files, "look", lambda _, name: same[name])
        monkeypatch.setattr(adapter_files, "_seen", lambda status: (0, 0, status.st_size, 0, 0))
        same["a"] = tuple(dataclasses.replace(f, seen=(0, 0, f.path.stat().st_size, 0, 0)) for f in same["a"])
        folders.store._folders["a"].files = same["a"]
        folders.now += 10 * LOOK_S
        assert await folders.store.acquire(llm, "a") is version
        assert await folders.store.acquire(llm, "a", afresh=True) is not version
        assert "other" in llm.held.values()

    asyncio.run(run())


def test_an_adapter_whose_folder_is_gone_is_refused_and_unloaded(folders):
    """Requests in flight keep it; new ones get the text for an unknown name."""
    llm, store = Llm(), folders.store

    async def use():
        version = await store.acquire(llm, "a")
        folders.remove("a")
        folders.now += 2 * LOOK_S
        with pytest.raises(InvalidRequestError, match=r"^LoRA a is not supported$"):
            await store.acquire(llm, "a")
        await store.tend(llm)
        assert llm.held == {3: "first"}
        version.users -= 1
        await store.tend(llm)

    asyncio.run(use())
    assert llm.held == {}
    assert folders.copies() == set()


def test_the_one_not_used_for_longest_makes_room(folders):
    """Among those that nobody uses; with all in use a request is told to come again."""
    llm, store = Llm(places=4), folders.store  # two of four are those of multi_lora.json
    folders.write("c", "third")

    async def use():
        first = await store.acquire(llm, "a")
        folders.now += 0.1
        second = await store.acquire(llm, "b")
        with pytest.raises(UnavailableError, match="2 LoRA adapters are in use, as many as this model holds"):
            await store.acquire(llm, "c")
        first.users -= 1
        second.users -= 1
        await store.acquire(llm, "c")

    asyncio.run(use())
    assert sorted(llm.held.values()) == ["second", "third"]
    assert store.names() == ["b", "c"]


def test_a_broken_adapter_is_tried_once_and_the_old_one_goes_on(folders):
    """The client hears no internals, the log has the reason; a new one is refused until its files change."""
    llm, store = Llm(places=4), folders.store
    folders.write("b", "broken")

    async def use():
        for _ in range(2):
            with pytest.raises(UnavailableError, match=r"^LoRA b could not be loaded; the server's log has the reason$"):
                await store.acquire(llm, "b")
        old = await store.acquire(llm, "a")
        folders.write("a", "broken")
        for _ in range(3):
            folders.now += 2 * LOOK_S
            assert await store.acquire(llm, "a") is old
        with pytest.raises(UnavailableError, match="LoRA a could not be loaded"):
            await store.acquire(llm, "a", afresh=True)  # an operator must know
        folders.write("b", "mended")
        assert (await store.acquire(llm, "b")).users == 1

    asyncio.run(use())
    said = [line for line in folders.log.lines if "could not be loaded" in line]
    assert len(said) == 3
    assert "no such layer" in said[0]
    assert "the one from before it was changed goes on" in said[1]
    assert folders.copies() == {str(number) for number in llm.held}


def test_an_engine_that_was_started_again_has_no_adapters(folders):
    """They are loaded into the new one at their next use, by new numbers."""
    store = folders.store

    async def use(llm):
        return (await store.acquire(llm, "a")).request.lora_int_id

    first, second = Llm(), Llm()
    assert [asyncio.run(use(llm)) for llm in (first, second)] == [3, 4]
    assert second.held == {4: "first"}
    assert folders.copies() == {"4"}


def test_nobody_waits_for_an_engine_that_has_died(folders):
    """EngineCore tells those who wait for an answer nothing when it dies."""
    llm, store = Llm(), folders.store

    async def use():
        llm.hangs = asyncio.Event()
        waiting = asyncio.ensure_future(store.acquire(llm, "a"))
        await llm.hangs.wait()
        store.give_up()
        with pytest.raises(UnavailableError, match=DEAD):
            await waiting
        llm.hangs = None
        await store.acquire(llm, "b")  # the lock is free

    asyncio.run(use())
    assert llm.held == {4: "second"}


@pytest.mark.parametrize("name", ["../a", "a/../b", "a\0", "", "x" * 129])
def test_what_is_no_folders_name_is_not_looked_for(folders, name):
    """Wherever it comes from, an operator included."""
    with pytest.raises(InvalidRequestError, match="is not supported"):
        asyncio.run(folders.store.acquire(Llm(), name, afresh=True))


def test_a_full_disk_is_not_the_adapters_fault(folders, monkeypatch):
    """It is tried again at the next request, and what is being written again, too."""
    llm, store = Llm(), folders.store
    errors = [OSError(28, "No space left on device"), ChangedError("adapter_model.safetensors")]
    copy = adapter_files.copy

    def fail_twice(*given):
        if errors:
            raise errors.pop(0)
        return copy(*given)

    monkeypatch.setattr(adapter_files, "copy", fail_twice)

    async def use():
        with pytest.raises(UnavailableError, match="could not be loaded"):
            await store.acquire(llm, "a")
        with pytest.raises(UnavailableError, match="is being written; try again later"):
            await store.acquire(llm, "a")
        return await store.acquire(llm, "a")

    assert asyncio.run(use()).users == 1
    assert llm.held == {5: "first"}


def test_an_adapter_that_is_being_replaced_goes_on_meanwhile(folders, monkeypatch):
    """A request that comes while its files change is answered by the old one."""
    llm, store = Llm(), folders.store

    def fail(*given):
        raise ChangedError("adapter_model.safetensors")

    async def use():
        old = await store.acquire(llm, "a")
        folders.write("a", "third")
        monkeypatch.setattr(adapter_files, "copy", fail)
        for _ in range(3):
            folders.now += 2 * LOOK_S
            assert await store.acquire(llm, "a") is old
        with pytest.raises(UnavailableError, match="could not be loaded"):
            await store.acquire(llm, "a", afresh=True)
        monkeypatch.undo()
        assert (await store.acquire(llm, "a", afresh=True)) is not old

    asyncio.run(use())
    assert sorted(llm.held.values()) == ["first", "third"]
