"""A LoRA adapter is found below the operator's directory only, and what vLLM reads is a copy."""

from __future__ import annotations

import os

import pytest

from triton_vllm.lora.adapter_files import ChangedError, copy, is_name, look


@pytest.fixture
def directory(tmp_path):
    """A directory with one adapter, `a`."""
    folder = tmp_path / "adapters" / "a"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("not copied")
    return tmp_path / "adapters"


@pytest.mark.parametrize("name", ["a", "sql-v2", "A.b_c", "x" * 128])
def test_names_of_folders(name):
    """Letters, digits, dots, dashes and underscores."""
    assert is_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "a\\b", ".a", "-a", "a\0", "a\n", "a b", "a@b", "ä", "x" * 129])
def test_names_that_are_none(name):
    """No separator, nothing hidden, no path up, nothing that the name in vLLM could be mixed up with."""
    assert not is_name(name)


def test_the_config_and_the_weights_are_found_and_copied(directory, tmp_path):
    """Nothing else is; the digest is that of the contents, whenever they were written."""
    files = look(directory, "a")
    assert [file.name for file in files] == ["adapter_config.json", "adapter_model.safetensors"]
    digest = copy(files, tmp_path / "one")
    assert {p.name: p.read_bytes() for p in (tmp_path / "one").iterdir()} == {
        "adapter_config.json": b"{}",
        "adapter_model.safetensors": b"weights",
    }
    os.utime(directory / "a" / "adapter_config.json", (1, 1))
    touched = look(directory, "a")
    assert touched != files
    assert copy(touched, tmp_path / "two") == digest
    (directory / "a" / "adapter_model.safetensors").write_bytes(b"Weights")
    assert copy(look(directory, "a"), tmp_path / "three") != digest


def test_a_replaced_file_differs_whatever_its_times_say(directory, tmp_path):
    """Of the same size, with the same time, in the same inode: an archive with times of its own was unpacked over it."""
    weights = directory / "a" / "adapter_model.safetensors"
    os.utime(weights, (1, 1))
    files = look(directory, "a")
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, (1, 1))
    replaced = look(directory, "a")
    assert [f.seen[:4] for f in replaced] == [f.seen[:4] for f in files]
    assert replaced != files
    assert copy(replaced, tmp_path / "one")


@pytest.mark.parametrize("gone", ["adapter_config.json", "adapter_model.safetensors"])
def test_half_an_adapter_is_none(directory, gone):
    """It needs both files; a folder that is not there is none, either."""
    (directory / "a" / gone).unlink()
    assert look(directory, "a") == look(directory, "b") == ()


def test_links_must_stay_within(directory, tmp_path):
    """A link to another adapter is as good as it; one out of the directory, of a folder or a file, finds nothing."""
    (directory / "same").symlink_to("a")
    assert look(directory, "same") == look(directory, "a")
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (outside / name).write_text("{}")
    (directory / "b").symlink_to(outside)
    assert look(directory, "b") == ()
    (directory / "a" / "adapter_model.safetensors").unlink()
    (directory / "a" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    assert look(directory, "a") == ()


def test_a_pipe_is_no_file(directory):
    """To open it would wait for ever."""
    (directory / "a" / "adapter_config.json").unlink()
    os.mkfifo(directory / "a" / "adapter_config.json")
    assert look(directory, "a") == ()


def test_what_has_changed_since_is_not_copied(directory, tmp_path):
    """Half of one adapter and half of the next is none; neither is a link that has taken the file's place."""
    files = look(directory, "a")
    weights = directory / "a" / "adapter_model.safetensors"
    weights.write_bytes(b"longer weights")
    with pytest.raises(ChangedError):
        copy(files, tmp_path / "one")
    weights.unlink()
    weights.symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic links"):
        copy(files, tmp_path / "two")


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_weights_may_be_of_an_older_kind(directory, name):
    """As vLLM finds them."""
    (directory / "a" / "adapter_model.safetensors").rename(directory / "a" / name)
    assert [file.name for file in look(directory, "a")] == ["adapter_config.json", name]
