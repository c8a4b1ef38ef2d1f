"""No space left, on real small file systems: at the cache, at the repository, at TMPDIR, at the server's /tmp."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from support.patience import wait_for
from support.small_disk import small_disk
from support.thin_builds import fill_cache, finished_lab, make_thin_lab

if TYPE_CHECKING:
    from pathlib import Path

    from support.chaos_lab import Lab

# In a mount namespace of its own /tmp is a file system of 1 GB, and the folders of the real one are where they were.
_MOUNT_SMALL_TMP = """\
mount --bind /tmp /media
mount -t tmpfs -o size=1g tmpfs /tmp
for folder in /media/*/; do
    name=${folder#/media/}
    mkdir "/tmp/$name"
    mount --bind "$folder" "/tmp/$name" || rmdir "/tmp/$name"  # gone meanwhile
done
exec "$@"
"""
_SMALL_TMP = ["unshare", "--mount", "sh", "-ec", _MOUNT_SMALL_TMP, "sh"]


def _take_the_rest(folder: Path) -> None:
    """Leave a mounted tmpfs no more than what is in use, however much that is by now."""
    shrunk = False
    while not shrunk:
        used = shutil.disk_usage(folder).used
        size = f"remount,size={used + 2**20}"
        shrunk = subprocess.run(["mount", "-o", size, folder], capture_output=True, check=False).returncode == 0


@pytest.fixture
def lab(small_wheel: Path, thin_wheels: Path, tmp_path: Path) -> Lab:
    """A spec, and no cache yet."""
    return make_thin_lab(tmp_path, small_wheel, thin_wheels)


@pytest.fixture
def finished(finished_place: Path, small_wheel: Path, thin_wheels: Path, tmp_path: Path) -> Lab:
    """A repository with a published set, and the cache from which it came."""
    return finished_lab(finished_place, tmp_path, small_wheel, thin_wheels)


def _digests(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def test_a_cache_that_is_too_small_is_refused_before_the_long_work(lab: Lab, thin_channel: Path) -> None:
    """Both figures and the remedy; no prefix is begun; the repository is not even made."""
    with small_disk(lab.cache, "300m"):
        fill_cache(thin_channel, lab.cache)
        build = lab.start()
        assert build.wait() == 1
        assert "No space: the environment needs" in build.text()
        assert "VLLM_ENV_CACHE" in build.text()
        assert lab.stray_files() == []
    assert not lab.repository.exists()


def test_a_cache_that_fills_up_meanwhile_is_a_clean_error(lab: Lab, thin_channel: Path) -> None:
    """Somebody else takes the space during the prefix stage: exit 1, the cause, nothing left; with space it goes on."""
    with small_disk(lab.cache, "7g"):
        fill_cache(thin_channel, lab.cache)
        build = lab.start()
        build.wait_for("prefix …")
        wait_for(  # until it has seen that there is space
            lambda: build.child.poll() is not None or list((lab.cache / "build").glob("*/made/env")),
            "the prefix",
            longest_pause=0.002,
        )
        _take_the_rest(lab.cache)
        assert build.wait() == 1
        assert "No space left" in build.text() or "file system is full" in build.text()
        assert "  fix: " in build.text()
        assert "Traceback" not in build.text()
        assert lab.stray_files() == []
        subprocess.run(["mount", "-o", "remount,size=7g", lab.cache], check=True)
        lab.finish()


def test_a_repository_without_space_is_as_before(finished: Lab) -> None:
    """The old set stands on another file system that has no room for a second one: exit 1, and not a byte has changed."""
    lab = finished
    size = sum(path.stat().st_size for path in lab.model.rglob("*") if path.is_file())
    shutil.rmtree(lab.repository)
    with small_disk(lab.repository, f"{size * 3 // 2}"):
        lab.finish()
        before = _digests(lab.repository)
        lab.targets.reverse()
        build = lab.start()
        assert build.wait() == 1
        assert "No space" in build.text()
        assert str(lab.repository) in build.text()
        assert _digests(lab.repository) == before
        assert lab.stray_files() == []


def test_a_tmp_too_small_for_the_smoke_run_is_refused_before_the_long_work(finished: Lab) -> None:
    """Triton extracts to /tmp, which TMPDIR does not move: /tmp and the ways out are named, and what stood stays."""
    may = subprocess.run([*_SMALL_TMP, "true"], capture_output=True, text=True, check=False)
    if may.returncode != 0:
        pytest.skip(f"a /tmp of its own cannot be mounted here: {may.stderr.strip()}")
    lab = finished
    lab.layout = "archive"
    before = _digests(lab.repository)
    lab.make_cold()
    build = lab.start(*_SMALL_TMP, smoke=True)
    assert build.wait() == 1
    assert "No space: Triton's extraction for the smoke run needs 2.5 GB in /tmp, and 1.1 GB are free." in build.text()
    assert "  fix: Free some space in /tmp" in build.text()
    assert "--layout parts" in build.text()
    assert "lock …" not in build.text()
    assert _digests(lab.repository) == before
    assert lab.stray_files() == []
    without = lab.start(*_SMALL_TMP)  # as the message says, --no-smoke-run needs no room there
    assert without.wait() == 0, without.text()
    assert _digests(lab.repository) != before


@pytest.mark.slow
def test_a_full_folder_for_temporary_files_is_named_or_not_needed(lab: Lab, thin_channel: Path) -> None:
    """TMPDIR has no byte left: the build says so, or ends well because it stages in the cache."""
    fill_cache(thin_channel, lab.cache)
    with small_disk(lab.temporary, "64k"):
        with contextlib.suppress(OSError), (lab.temporary / "fill").open("wb") as sink:
            sink.write(b"x" * 2**20)
        build = lab.start()
        status = build.wait()
        assert status in {0, 1}
        assert "Traceback" not in build.text()
        if status == 1:
            assert "No space left" in build.text() or "file system is full" in build.text()
            assert "  fix: " in build.text()
            assert not lab.model.exists()
        else:
            assert lab.published()
