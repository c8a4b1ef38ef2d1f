"""The records of a lock: what tells two locks apart, and what drifted between them."""

from __future__ import annotations

import dataclasses

from support.small_build import small_lock
from vllm_env.lock.pylock import requirements_of


def test_the_digest_is_of_what_is_locked_and_not_of_where_it_lies() -> None:
    """Equal for another folder of the same wheel, different for another wheel."""
    lock = small_lock()
    assert small_lock(folder="/elsewhere").digest == lock.digest
    changed = dataclasses.replace(lock.wheels[-1], sha256="5" * 64)
    assert dataclasses.replace(lock, wheels=(*lock.wheels[:-1], changed)).digest != lock.digest


def test_requirements_name_each_wheel_with_its_hash() -> None:
    """A version for what an index has, the place of a file that no index has."""
    lines = requirements_of(small_lock().wheels).splitlines()
    assert lines[0] == f"numpy==1.26.4 --hash=sha256:{'1' * 64}"
    assert lines[2] == f"vllm @ file:///cache/wheels/vllm-0.99.0-py3-none-any.whl --hash=sha256:{'4' * 64}"
