"""The lock of a file is held until its holder ends or gives it up."""

from __future__ import annotations

import os

import pytest

from triton_vllm.base import locks


def test_a_lock_is_one_holders_or_that_of_all_who_share_it(tmp_path):
    """Two descriptors are as good as two processes."""
    path = tmp_path / "lock"
    held = locks.take(path)
    for shared in (False, True):
        with pytest.raises(BlockingIOError):
            locks.take(path, shared=shared)
    locks.free(held)
    both = [locks.take(path, shared=True) for _ in range(2)]
    with pytest.raises(BlockingIOError):
        locks.take(path)
    for one in both:
        locks.free(one)
    locks.free(locks.take(path, waits=True))


def test_a_child_does_not_keep_a_lock_that_was_given_up(tmp_path):
    """EngineCore may have been forked meanwhile, and have the descriptor."""
    held = locks.take(tmp_path / "lock")
    in_child = os.dup(held)
    locks.free(held)
    locks.free(locks.take(tmp_path / "lock"))
    os.close(in_child)


def test_a_link_is_not_followed(tmp_path):
    """Whoever may write in the folder could choose the file."""
    (tmp_path / "lock").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        locks.take(tmp_path / "lock")
    assert not (tmp_path / "other").exists()
