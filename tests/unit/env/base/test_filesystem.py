"""Files and folders: digests, sizes, removal that spares mounted volumes, links, space, and the kernel's mount points."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.namespaces import with_mounts
from vllm_env.base import filesystem
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import (
    link_or_copy,
    mounts_in,
    put_in_place,
    remove_tree,
    require_space,
    write_whole,
)

_LINE = b"%d 1 8:1 /root %s rw,relatime shared:1 - ext4 /dev/sda1 rw\n"


def test_a_tree_is_removed_and_what_it_links_to_stays(tmp_path: Path) -> None:
    """A link inside is removed itself; a tree that is not there is no error."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep" / "link").symlink_to(tmp_path / "kept")
    remove_tree(tmp_path / "tree")
    remove_tree(tmp_path / "tree")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_tree_with_a_mounted_volume_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user has mounted there would be emptied."""
    volume = tmp_path / "tree" / "volume"
    volume.mkdir(parents=True)
    _mounted(tmp_path, monkeypatch, volume)
    remove_tree(tmp_path / "tree")
    assert volume.is_dir()
    monkeypatch.undo()
    remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_a_file_is_copied_to_another_file_system(tmp_path: Path, elsewhere: Path) -> None:
    """Content, mode and time as they were; a link stays a link."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "file").chmod(0o751)
    os.utime(tmp_path / "file", (1, 1))
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        link_or_copy(str(tmp_path / name), str(elsewhere / name))
    copied = (elsewhere / "file").stat()
    assert ((elsewhere / "file").read_text(), copied.st_mode & 0o777, copied.st_mtime) == ("text", 0o751, 1)
    assert copied.st_nlink == 1
    assert (elsewhere / "link").readlink() == Path("file")


def test_space_is_asked_for_before_the_folder_exists(tmp_path: Path) -> None:
    """The file system of the nearest existing folder decides; the message has both figures and a remedy."""
    require_space(tmp_path / "not" / "yet", 1, "a test")
    with pytest.raises(VllmEnvError, match=r"a test needs 1000000000\.0 GB in .*/not/yet, and .* GB are free") as caught:
        require_space(tmp_path / "not" / "yet", 10**18, "a test")
    assert "VLLM_ENV_CACHE" in caught.value.remedy
    with pytest.raises(VllmEnvError) as caught:
        require_space(tmp_path, 10**18, "a test", remedy="Do something else.")
    assert caught.value.remedy == "Do something else."


def _mounted(folder: Path, monkeypatch: pytest.MonkeyPatch, *points: object) -> None:
    """Write a list of mount points as the kernel does, with octal numbers for what would not be one word."""
    escaped = [os.fsencode(str(point)).replace(b"\\", rb"\134").replace(b" ", rb"\040") for point in points]
    lines = [_LINE % (number, point.replace(b"\t", rb"\011")) for number, point in enumerate([b"/", *escaped])]
    (folder / "mountinfo").write_bytes(b"".join(lines))
    monkeypatch.setattr(filesystem, "_MOUNTINFO", folder / "mountinfo")


@pytest.mark.parametrize("name", ["my weights", "tab\there", "back\\slash", "zwölf", "\\040", b"caf\xe9"])
def test_names_are_read_as_the_kernel_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | bytes) -> None:
    """Spaces, tabs, backslashes, and bytes that are no UTF-8."""
    point = tmp_path / os.fsdecode(name)
    _mounted(tmp_path, monkeypatch, *([point] if isinstance(name, str) else []))
    if isinstance(name, bytes):
        with (tmp_path / "mountinfo").open("ab") as sink:
            sink.write(_LINE % (9, os.fsencode(point)))
    assert mounts_in(tmp_path) == [point]


def test_a_folder_is_found_under_its_real_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel knows of no symbolic links; a repository may be reached by one, or by a relative path."""
    (tmp_path / "real" / "weights").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    _mounted(tmp_path, monkeypatch, tmp_path / "real" / "weights")
    assert mounts_in(tmp_path / "link") == [tmp_path / "real" / "weights"]
    monkeypatch.chdir(tmp_path)
    assert mounts_in(Path("link/weights")) == [tmp_path / "real" / "weights"]


def test_the_kernels_own_list_is_read(tmp_path: Path) -> None:
    """A real bind mount on the same file system, which st_dev does not tell, and a file that is one."""
    volume, model = tmp_path / "the volume", tmp_path / "my model"
    for folder in (volume, model / "my weights"):
        folder.mkdir(parents=True)
    (volume / "file").touch()
    (model / "file").touch()
    code = "import sys; from pathlib import Path; from vllm_env.base.filesystem import mounts_in\n"
    code += "print(*mounts_in(Path(sys.argv[1])), sep='\\n')"
    before = with_mounts((volume, model / "my weights"), (volume / "file", model / "file"))
    environment = {**os.environ, "PYTHONPATH": str(Path(filesystem.__file__).parents[2])}
    said = subprocess.check_output([*before, sys.executable, "-c", code, model], env=environment, text=True)
    assert said.splitlines() == [str(model / "my weights"), str(model / "file")]
    assert mounts_in(model) == []


def test_a_folder_is_put_where_a_link_leads_and_over_a_file(tmp_path: Path) -> None:
    """The link stays the user's; a file of that name goes, as a folder would."""
    for name in ("real", "made", "again"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").touch()
    put_in_place(tmp_path / "made", tmp_path / "link")
    put_in_place(tmp_path / "again", tmp_path / "file")
    assert (tmp_path / "link").readlink() == Path("real")
    assert [p.name for p in (*(tmp_path / "real").iterdir(), *(tmp_path / "file").iterdir())] == ["made", "again"]


def test_a_folder_that_cannot_be_put_in_place_is_named(tmp_path: Path, elsewhere: Path) -> None:
    """By a link to another file system, say."""
    (tmp_path / "made").mkdir()
    (tmp_path / "link").symlink_to(elsewhere / "real")
    with pytest.raises(VllmEnvError, match=f"{elsewhere}/real cannot be replaced") as caught:
        put_in_place(tmp_path / "made", tmp_path / "link")
    assert "link" in caught.value.remedy


def test_a_file_is_written_past_what_lies_beside_it(tmp_path: Path) -> None:
    """A planted link of the temporary file's name would let root overwrite any file."""
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / ".file.new").symlink_to("theirs")
    write_whole(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a part of the file nor a temporary one."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(filesystem, "give", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", "text")
    assert list(tmp_path.iterdir()) == []


def test_mount_points_at_and_below_a_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those above it nor those of a folder whose name begins alike."""
    model = tmp_path / "vllm"
    _mounted(tmp_path, monkeypatch, tmp_path, model, model / "1" / "weights", tmp_path / "vllm_2", model / "file")
    assert mounts_in(model) == [model, model / "1" / "weights", model / "file"]
    assert mounts_in(model / "1") == [model / "1" / "weights"]
    assert mounts_in(model / "adapters") == []
