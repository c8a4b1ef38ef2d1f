"""The cache: whole entries, bounded, nobody's leftovers, one build at a time."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from triton_vllm import warm_cache
from vllm_env import build
from vllm_env.base import cache
from vllm_env.base.errors import VllmEnvError


def _prefix(root: Path, key: str, size: int, used: float) -> Path:
    folder = root / "prefixes" / key
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(b"x" * size)
    os.utime(folder, (used, used))
    return folder


def _archive(root: Path, key: str, size: int, used: float) -> Path:
    folder = root / "archives"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{key}.tar.gz").write_bytes(b"x" * size)
    (folder / f"{key}.json").write_text("{}")
    os.utime(folder / f"{key}.json", (used, used))
    return folder / f"{key}.tar.gz"


def test_root_follows_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """VLLM_ENV_CACHE, else XDG_CACHE_HOME, else ~/.cache."""
    monkeypatch.setenv("VLLM_ENV_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.cache_root() == tmp_path / "own"
    monkeypatch.delenv("VLLM_ENV_CACHE")
    assert cache.cache_root() == tmp_path / "xdg" / "vllm_env"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_root() == tmp_path / "home" / ".cache" / "vllm_env"


def test_keys_depend_on_content_and_not_on_order_of_mappings() -> None:
    """Equal inputs have one key, different ones two."""
    assert cache.key_of({"a": 1, "b": 2}) == cache.key_of({"b": 2, "a": 1})
    assert cache.key_of("a", "b") != cache.key_of("ab")
    assert len(cache.key_of("x")) == 32


def test_eviction_frees_the_least_recently_used_first(tmp_path: Path) -> None:
    """What was used longest ago goes, until the limit is met; what the running build uses stays."""
    old, kept, new = (_prefix(tmp_path, key, 1000, used) for key, used in (("old", 1), ("kept", 2), ("new", 3)))
    cache.evict(tmp_path, {kept}, limit=2000)
    assert not old.exists()
    assert kept.exists()
    assert new.exists()


def test_eviction_keeps_what_is_in_use_however_full(tmp_path: Path) -> None:
    """The build's own entry is never freed."""
    kept, other = _prefix(tmp_path, "kept", 1000, 1), _prefix(tmp_path, "other", 10, 2)
    cache.evict(tmp_path, {kept}, limit=0)
    assert kept.exists()
    assert not other.exists()


def test_an_archive_is_freed_with_its_facts_and_counts_with_its_size(tmp_path: Path) -> None:
    """The gigabytes lie in the .tar.gz beside the facts: both go, and both are measured."""
    archive = _archive(tmp_path, "a" * 32, 5000, 1)
    assert cache.entries(tmp_path)[0].size >= 5000
    cache.evict(tmp_path, set(), limit=100)
    assert list(archive.parent.iterdir()) == []


def test_touch_saves_an_entry_from_eviction(tmp_path: Path) -> None:
    """A reused entry counts as new."""
    first, second = _prefix(tmp_path, "first", 1000, 1), _prefix(tmp_path, "second", 1000, 2)
    cache.touch(first)
    cache.evict(tmp_path, set(), limit=1500)
    assert first.exists()
    assert not second.exists()


@pytest.mark.parametrize("serves", [True, False])
def test_eviction_leaves_a_running_servers_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serves: bool
) -> None:
    """A start marks its copy as used, and weeks later vLLM still reads a file there whenever it meets a new shape."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("vllm_env.serve.leftovers._servers", lambda: [(os.getuid(), 0.0)] if serves else [])
    filled = tmp_path / "vllm_cache"
    filled.mkdir()
    (filled / warm_cache.RECORD).write_bytes(b"x" * 1000)
    copy = warm_cache.private_copy(filled, warm_cache.Record("", "", (), ""), os.environ)
    os.utime(copy, (1, 1))
    prefix = _prefix(cache.default_root(), "newer", 1000, 2)
    cache.evict(cache.default_root(), set(), limit=1000)
    assert (copy.exists(), prefix.exists()) == (serves, not serves)


def test_eviction_measures_once_an_hour(tmp_path: Path) -> None:
    """Measuring tens of gigabytes at each build would cost seconds."""
    cache.evict(tmp_path, set(), limit=0)
    entry = _prefix(tmp_path, "entry", 10, 1)
    cache.evict(tmp_path, set(), limit=0)
    assert entry.exists()
    os.utime(tmp_path / ".evicted", (time.time() - 4000,) * 2)
    cache.evict(tmp_path, set(), limit=0)
    assert not entry.exists()


def test_staging_is_removed_also_after_an_error(tmp_path: Path) -> None:
    """Whatever ends the block, nothing of it stays."""
    with pytest.raises(KeyboardInterrupt), cache.staging(tmp_path) as folder:  # noqa: PT012 - the block is the case
        (folder / "deep").mkdir()
        raise KeyboardInterrupt
    assert list((tmp_path / "build").iterdir()) == []


def test_no_space_in_staging_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    """ENOSPC in the middle of a stage says where, and what to do."""
    with pytest.raises(VllmEnvError, match="No space left in") as caught, cache.staging(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file")
    assert "/some/file" in caught.value.cause
    assert "VLLM_ENV_CACHE" in caught.value.remedy


def test_abandoned_staging_goes_and_that_of_a_living_build_stays(tmp_path: Path) -> None:
    """Only what nobody has locked is removed."""
    dead = tmp_path / "build" / "vllm_env-abcd_123"
    dead.mkdir(parents=True)
    with cache.staging(tmp_path) as alive:
        assert cache.abandoned(tmp_path) == [dead]
        assert dead.exists()
        assert cache.remove_abandoned(tmp_path) == [dead]
        assert [*alive.parent.iterdir()] == [alive]


@pytest.mark.parametrize("name", ["release-static", "2024-snapshot"])
def test_a_build_folder_that_is_not_ours_is_left_alone(tmp_path: Path, name: str) -> None:
    """VLLM_ENV_CACHE may name a folder in which a person builds something."""
    mine = tmp_path / "build" / name
    mine.mkdir(parents=True)
    assert cache.remove_abandoned(tmp_path) == []
    assert mine.exists()


def test_staging_goes_where_an_interrupt_hits_its_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupted build looks once more, and need not know which folders were its own."""

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "remove_tree", interrupted)
    with pytest.raises(KeyboardInterrupt), cache.staging(tmp_path) as folder:
        pass
    assert cache.remove_abandoned(tmp_path) == [folder]


def test_an_interrupted_build_looks_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """See above; the interrupt may come at any moment."""
    left = tmp_path / "build" / "vllm_env-abcd_123"

    def interrupted(*_: object, **__: object) -> None:
        left.mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "_build", interrupted)
    monkeypatch.setenv("VLLM_ENV_CACHE", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        build.build(cast("Any", None), cast("Any", None))
    assert not left.exists()


def test_a_second_build_waits_and_says_so(tmp_path: Path) -> None:
    """The lock is held by one; the other is told once and goes on when the first is done."""
    order: list[str] = []
    inside = threading.Event()

    def first() -> None:
        with cache.exclusive(tmp_path, lambda: order.append("first waits")):
            inside.set()
            time.sleep(0.3)
            order.append("first done")

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    with cache.exclusive(tmp_path, lambda: order.append("second waits")):
        order.append("second in")
    thread.join()
    assert order == ["second waits", "first done", "second in"]


def test_the_lock_of_a_killed_build_is_free(tmp_path: Path) -> None:
    """The kernel releases the lock: no stale lock file can block the next build."""
    code = (
        "import sys, time; from pathlib import Path; from vllm_env.base import cache\n"
        "with cache.exclusive(Path(sys.argv[1]), lambda: None):\n"
        "    print('in', flush=True); time.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(cache.__file__).parents[2])}
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=env, stdout=subprocess.PIPE)
    assert holder.stdout
    assert holder.stdout.readline() == b"in\n"
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with cache.exclusive(tmp_path, lambda: pytest.fail("it waits for a dead build")):
        pass


def test_space_is_asked_for_before_the_folder_exists(tmp_path: Path) -> None:
    """The file system of the nearest existing folder decides; the message has both figures."""
    cache.require_space(tmp_path / "not" / "yet", 1, "a test")
    with pytest.raises(VllmEnvError, match=r"a test needs 1000000000\.0 GB in .*/not/yet, and .* GB are free"):
        cache.require_space(tmp_path / "not" / "yet", 10**18, "a test")


def test_file_digest(tmp_path: Path) -> None:
    """SHA-256 as sha256sum prints it, also by the way of Python 3.10."""
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert cache.file_sha256(file) == expected
    with file.open("rb") as stream:
        assert cache._digest(stream) == expected
