"""What of a prefix goes into the small archive and what into parts, and that they are packed once."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import shutil
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest

from support.small_build import small_lock
from support.small_fixtures import copy_slim, workspace_in
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.inside import parts_places, parts_unpack
from vllm_env.layout import parts
from vllm_env.layout import unpacked as places
from vllm_env.layout.cached import parts_folder
from vllm_env.layout.layout import Packed
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.layout.tar import contents_of, write_archive
from vllm_env.prefix.prefix import Prefix
from vllm_env.prefix.relocate import install_runtime, make_relocatable, set_times, site_packages

pytestmark = pytest.mark.long

LAYOUT = LAYOUTS["parts"]
SITE = "lib/python3.11/site-packages"
ADDED = {f"{SITE}/{name}" for name in (*parts._UNPACKER, "01_vllm_env_parts.pth", parts_unpack.DESCRIPTION)}


@pytest.fixture(scope="module")
def prefix(bare_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix with the start-up hook and four packages."""
    prefix = tmp_path_factory.mktemp("parts") / "env"
    copy_slim(bare_prefix, prefix)
    install_runtime(prefix, "identity")
    for name in ("numpy/core.py", "numpy.libs/libblas.so", "vllm/__init__.py", "one.py", "two.cpython-311-x86_64-linux-gnu.so"):
        (prefix / SITE / name).parent.mkdir(exist_ok=True)
        (prefix / SITE / name).write_text("NAME = 1\n" * 40_000)
    make_relocatable(prefix, site_packages(prefix))
    set_times(prefix)
    return prefix


@pytest.fixture(scope="module")
def made(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """Its small archive and parts, of at most a megabyte each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "_PART_BYTES", 10**6)
        return LAYOUT.pack(workspace_in(tmp_path_factory.mktemp("cache")), Prefix(prefix, "key", small_lock(), (), reused=False))


def names(archive: Path) -> set[str]:
    with tarfile.open(archive) as opened:
        return set(opened.getnames())


def unpack(made: Packed, scratch: Path) -> Path:
    """Unpack where servers look, and wait for the thread that writes it to the disk and marks it again."""
    *_, whole = LAYOUT.open(made, None, scratch, keep=True)
    for thread in threading.enumerate():
        if thread.name == places.SYNC_THREAD:
            thread.join()
    return Path(whole.path)


def test_together_they_are_the_archive(made: Packed, prefix: Path, tmp_path: Path) -> None:
    """Every member is in one of them, once; beside what the archive has there is what unpacks the parts."""
    write_archive(contents_of(prefix), tmp_path / "whole.tar.gz")
    found = [names(parts_folder(made.path) / Path(part.name).name) for part in made.records[1:]]
    assert len(found) > 1
    base = names(made.path)
    assert sum(map(len, found)) + len(base) == len(set.union(base, *found))
    assert set.union(base, *found) == names(tmp_path / "whole.tar.gz") | ADDED


def test_an_import_has_the_parts_unpacked_and_no_other_start_does(made: Packed, tmp_path: Path) -> None:
    """The small archive's own interpreter, with its model's folder as a stub has it in its command line."""
    small, model = tmp_path / "small", tmp_path / "model"
    with tarfile.open(made.path) as opened:
        opened.extraction_filter = lambda member, _: member  # an argument since Python 3.11.4 only
        opened.extractall(small)
    (model / "1").mkdir(parents=True)
    (model / parts_unpack.FOLDER).symlink_to(parts_folder(made.path))
    script = model / "1" / "model.py"
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "VLLM_ENV_UNPACKED": str(tmp_path / "place")}
    for text, unpacks in (
        ("import json, numpy.core", False),
        ("import no_such_module", False),
        ("import vllm; print(vllm)", True),
    ):
        script.write_text(text)
        done = subprocess.run([small / "bin/python", script], env=variables, capture_output=True, text=True, check=False)
        assert (tmp_path / "place").exists() == unpacks, done.stderr
    assert str(tmp_path / "place") in done.stdout


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder for unpacked environments."""
    monkeypatch.setattr(parts_places, "places", lambda: [str(tmp_path / "place")])
    return tmp_path / "place"


def unpacked(place: Path) -> list[Path]:
    return [path for path in place.iterdir() if path.is_dir()]


def test_a_tree_that_passes_stays_where_servers_look(made: Packed, place: Path, tmp_path: Path) -> None:
    """Servers can use it while it is checked. The next time it is there, and the packed files are opened all the same."""
    small, whole = LAYOUT.open(made, None, tmp_path / "scratch", keep=True), []
    for tree in small:
        whole.append(tree.path)
        if tree.complete:
            assert parts_places.is_whole(str(tree.path))
            # Servers may share it, and nobody may remove it.
            with pytest.raises(BlockingIOError), parts_places.locked(str(tree.path)):
                pass
            with (tmp_path / f"place/{tree.path.name}.lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert whole[1].parent == place
    assert unpacked(place) == [whole[1]]
    assert parts_places.is_whole(str(whole[1]))
    with parts_places.locked(str(whole[1])):
        pass
    *_, again = LAYOUT.open(made, None, tmp_path / "again", keep=True)
    assert again.path == tmp_path / "again/1"
    assert (again.path / "bin/python3.11").is_file()


@pytest.mark.parametrize("used", [False, True])
def test_a_tree_that_fails_is_removed_unless_a_server_uses_it(made: Packed, place: Path, tmp_path: Path, *, used: bool) -> None:
    """Of an earlier model with the same environment, which started meanwhile."""
    with (
        contextlib.ExitStack() as until_ended,
        contextlib.closing(LAYOUT.open(made, None, tmp_path / "scratch", keep=True)) as trees,
    ):
        next(trees)
        tree = next(trees).path
        if used:
            lock = until_ended.enter_context((place / f"{tree.name}.lock").open())
            fcntl.flock(lock, fcntl.LOCK_SH)
        trees.close()
        assert tree.exists() == used


def test_files_of_the_prefix_are_linked_and_the_tree_is_the_same(made: Packed, prefix: Path, tmp_path: Path) -> None:
    """With and without the prefix: equal names, contents, modes and times. The small archive's files are copies."""
    assert made.prefix == prefix
    *_, linked = LAYOUT.open(made, None, tmp_path / "linked")
    *_, written = LAYOUT.open(dataclasses.replace(made, prefix=None), None, tmp_path / "written")
    assert state(linked.path) == state(written.path)
    assert (linked.path / SITE / "one.py").samefile(prefix / SITE / "one.py")
    assert not (written.path / SITE / "one.py").samefile(prefix / SITE / "one.py")
    assert not (linked.path / SITE / "numpy/core.py").samefile(prefix / SITE / "numpy/core.py")


def state(tree: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return the mode, the time and the content of each file."""
    files = [file for file in tree.rglob("*") if file.is_file() and not file.is_symlink()]
    return {str(f.relative_to(tree)): (f.stat().st_mode, int(f.stat().st_mtime), f.read_bytes()) for f in files}


def test_a_prefix_that_has_changed_is_not_linked(made: Packed, prefix: Path, tmp_path: Path) -> None:
    """What has another size or time is written as it was packed; what only looks the same is an error."""
    changed = tmp_path / "prefix"
    shutil.copytree(prefix, changed, symlinks=True)
    (changed / SITE / "one.py").write_text("NAME = 2\n" * 40_000)
    packed = dataclasses.replace(made, prefix=changed)
    *_, tree = LAYOUT.open(packed, None, tmp_path / "written")
    assert (tree.path / SITE / "one.py").read_text() == (prefix / SITE / "one.py").read_text()
    assert (tree.path / SITE / "vllm/__init__.py").samefile(changed / SITE / "vllm/__init__.py")
    shutil.copystat(prefix / SITE / "one.py", changed / SITE / "one.py")
    with pytest.raises(CommandError) as error:
        list(LAYOUT.open(packed, None, tmp_path / "refused"))
    assert "one.py is not the file that was packed" in error.value.tail


def test_the_processes_that_write_hold_the_lock(made: Packed, place: Path, tmp_path: Path) -> None:
    """They may outlive a build that is killed, and who has the lock removes the folder that they write to."""
    small = LAYOUT.open(made, None, tmp_path / "scratch", keep=True)
    worker = next(small).path / SITE / "_vllm_env_unpack/parts_worker.py"
    held = tmp_path / "held"
    note = f"""
for number in os.listdir("/proc/self/fd"):
    target = os.path.realpath("/proc/self/fd/" + number)
    if target.endswith(".lock"):
        with open({str(held)!r}, "a") as file:
            file.write(target + "\\n")
"""
    text = worker.read_text()
    worker.write_text(text.replace("import hashlib\n", f"import hashlib\nimport os\n{note}"))
    whole = next(small).path
    assert set(held.read_text().split()) == {f"{whole}.lock"}
    assert len(held.read_text().split()) == len(made.records)


def test_what_cannot_be_unpacked_leaves_nothing(made: Packed, place: Path, tmp_path: Path) -> None:
    """Neither a tree nor an unfinished one."""
    copy = tmp_path / "copy.tar.gz"
    shutil.copy(made.path, copy)
    shutil.copytree(parts_folder(made.path), parts_folder(copy))
    part = parts_folder(copy) / "000.tar.gz"
    part.write_bytes(part.read_bytes()[:-9] + b"x" * 9)
    with pytest.raises(VllmEnvError, match="Could not unpack the parts"):
        list(LAYOUT.open(dataclasses.replace(made, path=copy), None, tmp_path / "scratch", keep=True))
    assert unpacked(place) == []


@pytest.mark.parametrize("why", ["full", "others may write there", "a server unpacks it"])
def test_without_a_place_it_is_opened_in_the_scratch(
    made: Packed, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """And goes with it."""
    with contextlib.ExitStack() as meanwhile:
        if why == "full":
            monkeypatch.setattr(parts_places, "free", lambda _: 1000)
        if why == "others may write there":
            place.mkdir()
            place.chmod(0o777)
        if why == "a server unpacks it":
            whole = unpack(made, tmp_path / "first")
            shutil.rmtree(whole)
            meanwhile.enter_context(parts_places.locked(str(whole)))
        *_, tree = LAYOUT.open(made, None, tmp_path / "scratch", keep=True)
    assert tree.path == tmp_path / "scratch/1"
    assert not place.exists() or unpacked(place) == []


def test_space_for_a_server_is_asked_for_unless_it_has_its_environment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names each folder, and the remedy."""
    monkeypatch.setattr(places, "free_space", lambda _: 10**9)
    places.require_places(10**9, "the smoke run")
    with pytest.raises(VllmEnvError, match=rf"the smoke run unpacks 2\.0 GB, and there are only 1\.0 GB in {place}") as caught:
        places.require_places(2 * 10**9, "the smoke run")
    assert "VLLM_ENV_UNPACKED=DIR" in caught.value.remedy
    (place / "k").mkdir(parents=True)
    (place / "k.lock").touch()
    parts_places.mark(str(place / "k"), synced=True)
    places.require_places(2 * 10**9, "the smoke run")


def test_the_key_follows_the_layout_and_the_code_that_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are no archive, and other code that unpacks them makes others."""
    assert len({layout.key("a") for layout in LAYOUTS.values()}) == len(LAYOUTS)
    before = LAYOUT.key("a")
    monkeypatch.setattr(parts, "file_sha256", lambda _: "another")
    assert LAYOUT.key("a") != before
