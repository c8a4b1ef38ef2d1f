"""The conda layer: resolved and installed by py-rattler, from the local channel and from a remote one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.refusing_host import refusing_host
from support.small_fixtures import workspace_in
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.network import Network
from vllm_env.interpreter.layer import (
    REMOTE_CHANNEL,
    CondaLayer,
    choose_layer,
    copy_layer,
    install_layer,
    is_available,
    local_layer,
)

if TYPE_CHECKING:
    from support.small_fixtures import Channel


def test_the_local_channel_has_one_exact_python(channel: Channel) -> None:
    """The record is that of the file in the channel."""
    (package,) = channel.layer.packages
    file = channel.root / "conda/channel/linux-64" / package.file_name
    assert channel.layer.channel == "local"
    assert package.name == "python"
    assert package.sha256 == file_sha256(file)


def test_the_layer_of_this_machine_is_known_without_resolving(channel: Channel) -> None:
    """Equal to the one that was made first; a Python that this machine lacks is refused by name."""
    assert local_layer(channel.workspace, "3.11") == channel.layer
    with pytest.raises(VllmEnvError, match=r"Python 3\.99"):
        local_layer(channel.workspace, "3.99")


def test_an_installed_prefix_is_one_of_conda(bare_prefix: Path, channel: Channel) -> None:
    """conda-meta has the package's record, by which conda-pack knows the files."""
    (package,) = channel.layer.packages
    record = json.loads((bare_prefix / "conda-meta" / f"python-{package.version}-{package.build}.json").read_text())
    assert record["sha256"] == package.sha256
    assert "bin/python3.11" in record["files"]


def test_a_package_that_is_not_the_locks_is_refused(
    channel: Channel, small_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another digest than the locked one is not installed, however equal its name.

    The package is made again first; test_interpreter.py shows that this gives the same bytes, so here it is only put there again.
    """
    (package,) = channel.layer.packages
    made = channel.root / "conda/channel/linux-64" / package.file_name
    again: list[Path] = []

    def make(_: object, folder: Path, _staging: Path) -> Path:
        folder.mkdir(parents=True)
        again.append(Path(shutil.copy(made, folder)))
        return again[0]

    monkeypatch.setattr("vllm_env.interpreter.layer.make_package", make)
    changed = CondaLayer("local", (dataclasses.replace(package, sha256="0" * 64),))
    with pytest.raises(CommandError) as caught:
        install_layer(workspace_in(small_cache), changed, tmp_path / "env")
    assert len(again) == 1
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
    with pytest.raises(VllmEnvError, match=r"conda-forge has no Python 3\.11") as caught:
        choose_layer(workspace_in(tmp_path / "cache", Network()), "3.11")
    assert "libstdcxx" in caught.value.cause


def test_a_channel_that_does_not_answer_leaves_the_local_one(
    small_cache: Path, channel: Channel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A closed port and a missing folder are no reason to wait, or to fail."""
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for url in ("https://127.0.0.1:9/conda-forge", (tmp_path / "none").as_uri()):
        monkeypatch.setenv("VLLM_ENV_CONDA_CHANNEL", url)
        assert choose_layer(workspace_in(small_cache, Network()), "3.11") == channel.layer


@pytest.mark.parametrize("status", [403, 503])
def test_a_channel_that_refuses_leaves_the_local_one(
    status: int,
    small_cache: Path,
    channel: Channel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A proxy that takes the connection and refuses the rest; it is said."""
    with refusing_host(status) as url:
        monkeypatch.setenv("VLLM_ENV_CONDA_CHANNEL", url)
        assert choose_layer(workspace_in(small_cache, Network()), "3.11") == channel.layer
    assert "This machine's Python is taken" in capsys.readouterr().err


def test_the_first_choice_is_kept_until_upgrade(
    remote: Path, small_cache: Path, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A channel that answers later does not change what a second build packs; --upgrade asks it."""
    workspace = workspace_in(small_cache, Network())
    monkeypatch.setenv("VLLM_ENV_CONDA_CHANNEL", "file:///none")
    assert choose_layer(workspace, "3.11") == channel.layer
    monkeypatch.setenv("VLLM_ENV_CONDA_CHANNEL", remote.as_uri())
    assert choose_layer(workspace, "3.11") == channel.layer
    with pytest.raises(VllmEnvError, match="conda-forge has no"):
        choose_layer(workspace, "3.11", upgrade=True)


def test_packages_of_the_remote_channel_are_kept_and_installed_offline(
    remote: Path, channel: Channel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetched once into the cache; then neither the channel nor a solver's answer is needed."""
    layer = CondaLayer(REMOTE_CHANNEL, channel.layer.packages)
    online, offline = (workspace_in(tmp_path / "cache", Network(offline=off)) for off in (False, True))
    assert is_available(online, layer)
    install_layer(online, layer, tmp_path / "one")
    monkeypatch.setenv("VLLM_ENV_CONDA_CHANNEL", "https://127.0.0.1:9/gone")
    assert is_available(offline, layer)
    install_layer(offline, layer, tmp_path / "two")
    assert (tmp_path / "two" / "bin" / "python3.11").is_file()
    assert not is_available(workspace_in(tmp_path / "other"), layer)


def test_a_wheelhouse_serves_a_layer(channel: Channel, tmp_path: Path) -> None:
    """What copy_layer put there is installed by a machine with an empty cache and no network."""
    layer = CondaLayer(REMOTE_CHANNEL, channel.layer.packages)
    shutil.copytree(channel.root / "conda/channel", tmp_path / "cache/conda" / REMOTE_CHANNEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENV_CONDA_CHANNEL", (tmp_path / "cache/conda" / REMOTE_CHANNEL).as_uri())
        copy_layer(workspace_in(tmp_path / "cache"), layer, tmp_path / "house")
    empty = workspace_in(tmp_path / "empty", Network(offline=True, wheelhouse=tmp_path / "house"))
    assert choose_layer(empty, "3.11") == layer
    assert is_available(empty, layer)
    install_layer(empty, layer, tmp_path / "env")
    assert (tmp_path / "env" / "bin" / "python3.11").is_file()


def test_the_interpreter_that_a_wheelhouse_brings_is_taken(
    channel: Channel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that has no such Python builds the same environment; another Python is not taken for it."""
    copy_layer(channel.workspace, channel.layer, tmp_path / "house")
    (tmp_path / "house/conda/layer-3.12.json").write_text("another")
    monkeypatch.setattr("vllm_env.interpreter.layer.find_interpreter", lambda _: pytest.fail("it is looked for"))
    empty = workspace_in(tmp_path / "empty", Network(offline=True, wheelhouse=tmp_path / "house"))
    assert choose_layer(empty, "3.11") == channel.layer
    install_layer(empty, channel.layer, tmp_path / "env")
    assert (tmp_path / "env" / "bin" / "python3.11").is_file()
    assert not (tmp_path / "empty" / "conda" / "channel").exists()
