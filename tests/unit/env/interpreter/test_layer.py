"""The conda layer: resolved and installed by py-rattler, from the local channel and from a remote one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import TYPE_CHECKING

import pytest

from vllm_env.base import cache
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.interpreter import layer as conda

if TYPE_CHECKING:
    from pathlib import Path

    from support.small_fixtures import Channel


def test_the_local_channel_has_one_exact_python(channel: Channel) -> None:
    """The record is that of the file in the channel."""
    (package,) = channel.layer.packages
    file = channel.root / "conda/channel/linux-64" / package.file_name
    assert channel.layer.channel == "local"
    assert package.name == "python"
    assert package.sha256 == cache.file_sha256(file)


def test_the_layer_of_this_machine_is_known_without_resolving(channel: Channel) -> None:
    """A lock is compared with what this machine would give; None means that it has no such Python."""
    assert conda.local_layer("3.11", channel.root) == channel.layer
    assert conda.local_layer("3.99", channel.root) is None


def test_an_installed_prefix_is_one_of_conda(bare_prefix: Path, channel: Channel) -> None:
    """conda-meta has the package's record, by which conda-pack knows the files."""
    (package,) = channel.layer.packages
    record = json.loads((bare_prefix / "conda-meta" / f"python-{package.version}-{package.build}.json").read_text())
    assert record["sha256"] == package.sha256
    assert "bin/python3.11" in record["files"]


def test_a_package_that_is_not_the_locks_is_refused(channel: Channel, small_cache: Path, tmp_path: Path) -> None:
    """Another digest than the locked one is not installed, however equal its name."""
    (package,) = channel.layer.packages
    changed = conda.CondaLayer("local", (dataclasses.replace(package, sha256="0" * 64),))
    with pytest.raises(CommandError) as caught:
        conda.install_layer(changed, tmp_path / "env", small_cache)
    assert "the lock has" in caught.value.tail
    assert not (tmp_path / "env" / "bin").exists()


@pytest.fixture
def remote(channel: Channel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A channel of the form of conda-forge in a folder, in place of the real one."""
    folder = tmp_path / "remote"
    shutil.copytree(channel.root / "conda/channel", folder)
    monkeypatch.setenv("VLLM_ENV_CONDA_CHANNEL", folder.as_uri())
    return folder


def test_a_remote_channel_is_preferred_and_must_have_what_is_asked(remote: Path, tmp_path: Path) -> None:
    """Where conda-forge answers, it is asked; without the C++ library there the message says what it lacks."""
    assert conda.remote_answers()
    with pytest.raises(VllmEnvError, match=r"conda-forge has no Python 3\.11") as caught:
        conda.solve_layer("3.11", tmp_path / "cache", offline=False)
    assert "libstdcxx" in caught.value.cause


def test_offline_never_asks_the_remote_channel(remote: Path, small_cache: Path) -> None:
    """--offline takes this machine's interpreter although a channel would answer."""
    assert conda.solve_layer("3.11", small_cache, offline=True).channel == "local"


def test_a_channel_that_does_not_answer_is_known_quickly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A closed port and a missing folder are no reason to wait."""
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for url in ("https://127.0.0.1:9/conda-forge", (tmp_path / "none").as_uri()):
        monkeypatch.setenv("VLLM_ENV_CONDA_CHANNEL", url)
        assert not conda.remote_answers()
