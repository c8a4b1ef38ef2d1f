"""An adapter is found only where it may be, and what vLLM reads is a copy."""

from __future__ import annotations

import asyncio
import os
import shutil

import pytest

from triton_vllm.base.errors import UnavailableError
from triton_vllm.lora.copies import Copies, look


@pytest.fixture
def directory(tmp_path):
    """A directory with one adapter, `a`."""
    folder = tmp_path / "adapters" / "a"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("not copied")
    return tmp_path / "adapters"


@pytest.fixture
def copies():
    """Copies of this process alone."""
    made = Copies()
    yield made
    made.close()
    assert not made._folder.exists()


def make(copies, files):
    return asyncio.run(copies.make(files))


def contents(copy):
    return {path.name: path.read_bytes() for path in copy.folder.iterdir()}


def test_the_config_and_the_weights_are_found_and_copied(directory, copies):
    """Nothing else is; equal contents have one copy, whenever they were written."""
    files = look(directory / "a")
    assert [file.name for file in files] == ["adapter_config.json", "adapter_model.safetensors"]
    copy = make(copies, files)
    assert contents(copy) == {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
    os.utime(directory / "a" / "adapter_config.json", (1, 1))
    touched = look(directory / "a")
    assert touched != files
    assert make(copies, touched) is copy
    (directory / "a" / "adapter_model.safetensors").write_bytes(b"Weights")
    assert make(copies, look(directory / "a")).digest != copy.digest
    assert contents(copy)["adapter_model.safetensors"] == b"weights"


def test_a_copy_stays_as_long_as_somebody_has_it(directory, copies):
    """It is made again after that."""
    files = look(directory / "a")
    copy = make(copies, files)
    folder = copy.folder
    again = make(copies, files)
    del copy
    assert folder.is_dir()
    del again
    assert not folder.exists()
    new = make(copies, files)
    assert (new.folder.is_dir(), new.folder == folder) == (True, False)  # the earlier one may be on its way out still
    assert not list(copies._folder.glob("new-*"))


def test_a_replaced_file_differs_whatever_its_times_say(directory, copies):
    """Of the same size, with the same time, in the same inode: an archive with times of its own was unpacked over it."""
    weights = directory / "a" / "adapter_model.safetensors"
    os.utime(weights, (1, 1))
    files = look(directory / "a")
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, (1, 1))
    replaced = look(directory / "a")
    assert [(f.size, f.state[:3]) for f in replaced] == [(f.size, f.state[:3]) for f in files]
    assert replaced != files
    assert make(copies, replaced)


@pytest.mark.parametrize("gone", ["adapter_config.json", "adapter_model.safetensors"])
def test_half_an_adapter_is_none(directory, gone):
    """It needs both files; a folder that is not there is none, either."""
    (directory / "a" / gone).unlink()
    assert look(directory / "a") == look(directory / "b") == ()


def test_links_must_stay_within(directory, tmp_path):
    """A link to another adapter is as good as it; one out of the directory, of a folder or a file, finds nothing."""
    (directory / "same").symlink_to("a")
    assert look(directory / "same", directory) == look(directory / "a", directory) != ()
    outside = tmp_path / "outside"
    shutil.copytree(directory / "a", outside)
    (directory / "b").symlink_to(outside)
    assert look(directory / "b", directory) == ()
    (directory / "a" / "adapter_model.safetensors").unlink()
    (directory / "a" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    assert look(directory / "a", directory) == ()
    assert len(look(directory / "a")) == 2  # an operator's own path, as in a hub's cache
    (tmp_path / "link").symlink_to(directory)
    assert look(tmp_path / "link" / "same", tmp_path / "link") == ()  # its weights lead outside now
    (directory / "a" / "adapter_model.safetensors").unlink()
    (directory / "a" / "adapter_model.bin").write_bytes(b"weights")
    assert len(look(tmp_path / "link" / "same", tmp_path / "link")) == 2


def test_a_pipe_is_no_file(directory, copies):
    """To open it would wait for ever, also where it has taken a file's place."""
    files = look(directory / "a")
    (directory / "a" / "adapter_config.json").unlink()
    os.mkfifo(directory / "a" / "adapter_config.json")
    assert look(directory / "a") == ()
    with pytest.raises(UnavailableError, match="is being written"):
        make(copies, files)


def test_what_has_changed_since_is_not_copied(directory, copies):
    """Half of one adapter and half of the next is none; neither is a link that has taken the file's place."""
    files = look(directory / "a")
    weights = directory / "a" / "adapter_model.safetensors"
    weights.write_bytes(b"longer weights")
    with pytest.raises(UnavailableError, match=r"^LoRA file adapter_model.safetensors is being written; try again later$"):
        make(copies, files)
    (directory / "other").write_bytes(b"WEIGHTS")  # of the same size
    (directory / "other").replace(weights)
    with pytest.raises(UnavailableError, match="is being written"):
        make(copies, files)
    weights.unlink()
    weights.symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic links"):
        make(copies, files)
    assert list(copies._folder.iterdir()) == []
