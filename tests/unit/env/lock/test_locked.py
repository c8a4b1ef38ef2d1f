"""The records of a lock: what tells two locks apart, and what drifted between them."""

from __future__ import annotations

import dataclasses

from support.small_build import small_lock


def test_the_digest_is_of_what_is_locked_and_not_of_where_it_lies() -> None:
    """Equal for another folder of the same wheel, different for another wheel."""
    lock = small_lock()
    assert small_lock(folder="/elsewhere").digest == lock.digest
    changed = dataclasses.replace(lock.wheels[-1], sha256="5" * 64)
    assert dataclasses.replace(lock, wheels=(*lock.wheels[:-1], changed)).digest != lock.digest
