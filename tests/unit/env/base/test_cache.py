"""The cache: whole entries, bounded, nobody's leftovers, one build at a time."""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING

import pytest

from vllm_env.base import cache, locks
from vllm_env.base.cache import Cache
from vllm_env.base.errors import VllmEnvError

if TYPE_CHECKING:
    from pathlib import Path


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


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not a raw error of the first thing that is written."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_ENV_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(VllmEnvError, match=rf"{tmp_path}/file/cache cannot be written by user \d+\..*VLLM_ENV_CACHE=DIR"):
        cache.cache_root()


@pytest.mark.parametrize("named", [False, True])
def test_where_the_home_cannot_be_written_all_caches_move(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: bool) -> None:
    """Below VLLM_ENV_CACHE if that is given, so that uv's and pip's follow; one that can be written stays."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("VLLM_ENV_CACHE", raising=False)
    cache.settle_home(tmp_path / "tools", {})
    assert cache.cache_root() == tmp_path / ".cache" / "vllm_env"
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    if named:
        monkeypatch.setenv("VLLM_ENV_CACHE", str(tmp_path / "own"))
    cache.settle_home(tmp_path / "tools", {})
    assert os.environ["XDG_CACHE_HOME"] == str(tmp_path / ("own" if named else "tools"))
    assert cache.cache_root() == (tmp_path / "own" if named else tmp_path / "tools" / "vllm_env")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for others")
@pytest.mark.parametrize("mounted", [False, True])
def test_what_root_fills_is_the_folders_owners(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mounted: bool) -> None:
    """A user's own folder mounted as the cache, or one that root made in a user's folder; root's own stays root's."""
    root = tmp_path / "home" / "cache"
    (root / "prefixes").mkdir(parents=True)
    (root / "build.lock").touch()
    monkeypatch.setenv("VLLM_ENV_CACHE", str(root))
    cache.give_cache()
    assert (root / "build.lock").stat().st_uid == 0
    os.chown(root if mounted else root.parent, 12345, 12345)
    cache.give_cache()
    assert {path.stat().st_uid for path in (root, *root.rglob("*"))} == {12345}


def test_eviction_frees_the_least_recently_used_first(tmp_path: Path) -> None:
    """What was used longest ago goes, until the limit is met; what the running build uses stays."""
    old, kept, new = (_prefix(tmp_path, key, 1000, used) for key, used in (("old", 1), ("kept", 2), ("new", 3)))
    Cache(tmp_path).evict({kept}, limit=2000)
    assert not old.exists()
    assert kept.exists()
    assert new.exists()


def test_an_archive_is_freed_with_its_facts_and_counts_with_its_size(tmp_path: Path) -> None:
    """The gigabytes lie in the .tar.gz beside the facts: both go, and both are measured."""
    archive = _archive(tmp_path, "a" * 32, 5000, 1)
    assert Cache(tmp_path).entries()[0].size >= 5000
    Cache(tmp_path).evict(set(), limit=100)
    assert list(archive.parent.iterdir()) == []


def test_touch_saves_an_entry_from_eviction(tmp_path: Path) -> None:
    """A reused entry counts as new."""
    first, second = _prefix(tmp_path, "first", 1000, 1), _prefix(tmp_path, "second", 1000, 2)
    cache.touch(first)
    Cache(tmp_path).evict(set(), limit=1500)
    assert first.exists()
    assert not second.exists()


def test_eviction_measures_once_an_hour(tmp_path: Path) -> None:
    """Measuring tens of gigabytes at each build would cost seconds."""
    Cache(tmp_path).evict(set(), limit=0)
    entry = _prefix(tmp_path, "entry", 10, 1)
    Cache(tmp_path).evict(set(), limit=0)
    assert entry.exists()
    os.utime(tmp_path / ".evicted", (time.time() - 4000,) * 2)
    Cache(tmp_path).evict(set(), limit=0)
    assert not entry.exists()


def test_no_space_in_staging_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    """ENOSPC in the middle of a stage says where, and what to do."""
    with pytest.raises(VllmEnvError, match="No space left in") as caught, Cache(tmp_path).staging():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file")
    assert "/some/file" in caught.value.cause
    assert "VLLM_ENV_CACHE" in caught.value.remedy


def test_abandoned_staging_goes_and_that_of_a_living_build_stays(tmp_path: Path) -> None:
    """Only what nobody has locked is removed."""
    dead = tmp_path / "build" / "vllm_env-abcd_123"
    dead.mkdir(parents=True)
    with Cache(tmp_path).staging() as alive:
        assert Cache(tmp_path).abandoned() == [dead]
        assert dead.exists()
        assert Cache(tmp_path).remove_abandoned() == [dead]
        assert [*alive.parent.iterdir()] == [alive]


@pytest.mark.parametrize("name", ["release-static", "2024-snapshot"])
def test_a_build_folder_that_is_not_ours_is_left_alone(tmp_path: Path, name: str) -> None:
    """VLLM_ENV_CACHE may name a folder in which a user builds something."""
    mine = tmp_path / "build" / name
    mine.mkdir(parents=True)
    assert Cache(tmp_path).remove_abandoned() == []
    assert mine.exists()


def test_staging_goes_where_an_interrupt_hits_its_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupted build looks once more, and need not know which folders were its own."""

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(locks, "remove_tree", interrupted)
    with pytest.raises(KeyboardInterrupt), Cache(tmp_path).staging() as folder:
        pass
    assert Cache(tmp_path).remove_abandoned() == [folder]
