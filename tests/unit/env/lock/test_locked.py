"""The records of a lock: what tells two locks apart, and what drifted between them."""

from __future__ import annotations

import dataclasses

from support.small_build import small_lock
from vllm_env.lock.pylock import Inputs, requirements_of


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


def test_the_sizes_that_are_known_are_summed() -> None:
    """A wheel whose index gives no size counts nothing."""
    lock = small_lock()
    unsized = dataclasses.replace(lock.wheels[0], size=0)
    sized = dataclasses.replace(lock.wheels[1], size=7)
    assert dataclasses.replace(lock, wheels=(unsized, sized)).download_size == 7


def test_drift_names_each_input_with_both_values() -> None:
    """A list reads as in the spec; equal inputs have none."""
    old = Inputs("cpu", "vllm==1", "vllm", "3.11", requirements=("ray",))
    new = dataclasses.replace(old, python="3.12", requirements=())
    assert old.drift(old) == ""
    assert old.drift(new) == "python was '3.11' and is '3.12'; requirements was ['ray'] and is []"
