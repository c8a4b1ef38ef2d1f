"""Parts on a machine of their own: one unpacking, whole or not at all, bounded, verified, with another place to fall back to."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from support.small_parts import KEY, SITE, Small
from vllm_env.inside import parts_places, parts_unpack
from vllm_env.inside.parts_places import MARK, VARIABLE
from vllm_env.inside.parts_unpack import FOLDER, UnpackError

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.long


def contents(tree: Path) -> Mapping[str, object]:
    """Every file and link below a folder by its name, but for the marker."""
    found = {}
    for path in sorted(tree.rglob("*")):
        if path.name.startswith(MARK):
            continue
        name = str(path.relative_to(tree))
        found[name] = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


def test_the_first_start_unpacks_and_leads_there(small: Small, tmp_path: Path) -> None:
    """The tree is the parts and the small archive without its own loader, with modes and times; the next start finds it."""
    place = tmp_path / "place"
    status, out, log = small.run(place)
    assert status == 0, log
    tree = place / KEY
    assert out == [str(tree), str(tree / SITE / "one.py"), str(tree), f"{tree}/bin:/bin", "False"]
    whole = contents(tree)
    expected = {str(p.relative_to(tmp_path / "source")) for p in (tmp_path / "source").rglob("*")}
    assert whole.keys() >= expected | {"lib/base.txt", "bin/python"}
    assert not {Path(name).name for name in whole} & set(parts_unpack.OWN)
    assert whole[str(SITE / "big.bin")] == (tmp_path / "source" / SITE / "big.bin").read_bytes()
    assert (whole[str(SITE / "link")], os.access(tree / SITE / "tool", os.X_OK)) == ("big.bin", True)
    assert (tree / SITE / "one.py").stat().st_mtime == 1577836800.0  # bytecode goes by it
    assert "unpacking" in log
    before = (tree / SITE / "one.py").stat().st_ctime_ns
    status, again, log = small.run(place)
    assert (status, again) == (0, out)
    assert "is unpacked in" in log
    assert "unpacking" not in log
    assert (tree / SITE / "one.py").stat().st_ctime_ns == before


@pytest.mark.parametrize("spoil", ["changed", "cut", "missing"])
def test_a_part_that_is_not_what_was_built_is_refused(small: Small, tmp_path: Path, spoil: str) -> None:
    """By its digest, size or absence; the message names the part, and no place is left with a tree."""
    part = small.model / FOLDER / "001.tar.gz"
    data = part.read_bytes()
    if spoil == "missing":
        part.unlink()
    else:
        part.write_bytes(data[:-1] if spoil == "cut" else data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
    status, _, log = small.run(tmp_path / "place")
    assert status != 0
    assert "001.tar.gz" in log.splitlines()[-1]
    assert "build it again" in log.splitlines()[-1]
    assert [p for p in tmp_path.glob("**/place/*") if p.is_dir()] == []


def test_after_a_restart_of_the_machine_only_what_the_disk_has_is_trusted(small: Small, tmp_path: Path) -> None:
    """A marker of another boot without the disk's word counts for nothing, with it for everything."""
    place = tmp_path / "place"
    assert small.run(place)[0] == 0
    (place / KEY / SITE / "one.py").write_bytes(b"")  # what a power failure leaves of a file
    mark = place / KEY / MARK
    mark.write_text(json.dumps({"boot": "another", "synced": False}))
    status, _, log = small.run(place)
    assert status == 0, log
    assert (place / KEY / SITE / "one.py").read_bytes() == b"ONE = 1\n"
    mark.write_text(json.dumps({"boot": "another", "synced": True}))
    assert "is unpacked in" in small.run(place)[2]


def test_others_may_not_write_where_code_is_taken_from(small: Small, tmp_path: Path) -> None:
    """A folder that everybody may write is neither filled nor believed."""
    place = tmp_path / "place"
    assert small.run(place)[0] == 0
    place.chmod(0o777)
    status, out, log = small.run(place)
    assert status == 0, log
    assert out[0] != str(place / KEY)
    assert "chmod go-w" in log


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's link")
def test_anothers_link_is_not_followed(tmp_path: Path) -> None:
    """A link to one's own folder, as anybody can make it in /tmp, is one's own choice only if it is one's own."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    assert parts_places.is_safe(str(tmp_path / "link"))
    os.lchown(tmp_path / "link", 12345, 12345)
    assert not parts_places.is_safe(str(tmp_path / "link"))


def test_nowhere_to_go_says_what_to_do(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place and its reason, and the remedy."""
    monkeypatch.setattr(parts_unpack, "places", lambda: ["/proc/nowhere", "/sys/nowhere"])
    with pytest.raises(UnpackError, match=r"/proc/nowhere: .*; /sys/nowhere: .*VLLM_ENV_UNPACKED"):
        parts_unpack.find(small.facts, small.parts, lambda _: None)


def test_too_little_space_is_found_out_before_anything_is_unpacked(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unused environments go first; what is still too little passes the place over."""
    old, place = "f" * 32, tmp_path / "place"
    (place / old).mkdir(parents=True, mode=0o700)
    (place / f"{old}.lock").touch()
    place.chmod(0o700)
    monkeypatch.setattr(parts_unpack, "places", lambda: [str(place)])
    monkeypatch.setattr(parts_unpack, "free", lambda _: 10**6)
    with pytest.raises(UnpackError, match=r"0\.0 GB are free, 0\.1 GB are needed"):
        parts_unpack.find(small.facts, small.parts, lambda _: None)
    assert [p.name for p in place.iterdir() if p.is_dir()] == []


def environments(place: Path, letters: str) -> dict[str, Path]:
    """Make whole environments, the last one used last."""
    trees = {letter: place / (32 * letter) for letter in letters}
    for number, tree in enumerate(trees.values()):
        tree.mkdir()
        tree.with_name(f"{tree.name}.lock").touch()
        (tree / MARK).write_text("{}")
        os.utime(tree / MARK, (1000 + number, 1000 + number))
    return trees


def test_the_bound_spares_what_is_in_use_and_the_last_one(tmp_path: Path) -> None:
    """Of four, the one in use and the most recently used one stay, and what a killed start left goes."""
    trees = environments(tmp_path, "abcd")
    (tmp_path / f"{trees['d'].name}.left").mkdir()
    with trees["a"].with_name(f"{trees['a'].name}.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        planned = parts_places.remove_unused(str(tmp_path), dry_run=True)
        assert trees["b"].is_dir()
        assert sorted(parts_places.remove_unused(str(tmp_path))) == sorted(planned)
    assert sorted(p for p in tmp_path.iterdir() if p.is_dir()) == [trees["a"], trees["d"]]


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """A folder that the operator names may hold other things with locks, and a place that others may write is not looked into."""
    for name in ("llama", "llama.v2"):
        (tmp_path / name).mkdir()
    (tmp_path / "llama.lock").touch()
    trees = environments(tmp_path, "ab")
    assert parts_places.remove_unused(str(tmp_path), 0, dry_run=True) == [str(trees["b"]), str(trees["a"])]
    parts_places.remove_unused(str(tmp_path), 0)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["llama", "llama.v2"]
    open_to_all = tmp_path / "llama"
    environments(open_to_all, "c")
    open_to_all.chmod(0o777)
    assert parts_places.remove_unused(str(open_to_all), 0) == []


def test_a_damaged_environment_that_is_in_use_is_passed_over(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user holds the lock for as long as it runs, so nobody can mend it: the place is given up, not tried for ever."""
    waits: list[float] = []
    # its own clock: other tests' threads sleep, too
    monkeypatch.setattr(parts_unpack, "time", SimpleNamespace(sleep=waits.append, monotonic=time.monotonic))
    used = tmp_path / "used"
    used.mkdir(mode=0o700)
    lock = used / f"{small.facts['key']}.lock"
    lock.touch()
    monkeypatch.setattr(parts_unpack, "places", lambda: [str(used)])
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        with pytest.raises(UnpackError, match=r"a running process uses .*, which is damaged"):
            parts_unpack.find(small.facts, small.parts, lambda _: None)
    assert len(waits) == parts_unpack._ROUNDS


def test_a_place_from_which_nothing_may_be_run_is_passed_over(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries are mapped from there."""
    monkeypatch.setattr(parts_unpack, "places", lambda: [str(tmp_path / "place")])
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(UnpackError, match="place: it is mounted noexec"):
        parts_unpack.find(small.facts, small.parts, lambda _: None)


def test_a_network_file_system_is_passed_over(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log says why. What is there whole is used all the same."""
    far, near = tmp_path / "far", tmp_path / "near"
    monkeypatch.setattr(parts_unpack, "places", lambda: [str(far), str(near)])
    monkeypatch.setattr(parts_places, "_file_system", lambda place: 0x6969 if place == str(far) else 0)
    monkeypatch.setattr(parts_unpack, "_prefix", str(small.folder))
    monkeypatch.setattr(parts_unpack, "_package", str(small.folder / SITE / "_vllm_env_unpack"))
    told: list[str] = []
    assert parts_unpack.find(small.facts, small.parts, told.append) == str(near / KEY)
    assert f"cannot unpack in {far}: it is on a network file system (NFS)" in told
    (near / KEY).rename(far / KEY)
    (far / f"{KEY}.lock").touch()
    assert parts_unpack.find(small.facts, small.parts, told.append) == str(far / KEY)


def test_a_network_file_system_that_the_operator_names_is_used(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log warns of the slow starts."""
    far = tmp_path / "far"
    monkeypatch.setenv(VARIABLE, str(far))
    monkeypatch.setattr(parts_places, "_file_system", lambda place: 0x6969 if place == str(far) else 0)
    monkeypatch.setattr(parts_unpack, "_prefix", str(small.folder))
    monkeypatch.setattr(parts_unpack, "_package", str(small.folder / SITE / "_vllm_env_unpack"))
    told: list[str] = []
    assert parts_unpack.find(small.facts, small.parts, told.append) == str(far / KEY)
    assert _warning(far) in told


def _warning(place: Path) -> str:
    return (
        f"{place} is on a network file system (NFS): slow starts. If this start hangs, set {VARIABLE} to a folder on a local disk"
    )


@pytest.mark.parametrize("is_there", [False, True])
def test_a_network_file_system_without_locks_is_passed_over(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """The log names the folder and what to do, before it waits for a lock that may never come."""
    far, near = tmp_path / "far", tmp_path / "near"
    monkeypatch.setattr(parts_unpack, "places", lambda: [str(far), str(near)])
    monkeypatch.setenv(VARIABLE, str(far))
    monkeypatch.setattr(parts_places, "_file_system", lambda place: 0x6969 if place == str(far) else 0)
    monkeypatch.setattr(parts_unpack, "_prefix", str(small.folder))
    monkeypatch.setattr(parts_unpack, "_package", str(small.folder / SITE / "_vllm_env_unpack"))
    if is_there:
        (far / KEY).mkdir(parents=True, mode=0o700)
        (far / f"{KEY}.lock").touch()
        parts_places.mark(str(far / KEY), synced=True)
    told: list[str] = []
    told_before_a_lock: list[list[str]] = []
    lock = fcntl.flock

    def no_lock_service(handle: int, operation: int) -> None:
        if not Path(f"/proc/self/fd/{handle}").readlink().is_relative_to(far):
            lock(handle, operation)
            return
        told_before_a_lock.append(list(told))
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_lock_service)
    assert parts_unpack.find(small.facts, small.parts, told.append) == str(near / KEY)
    reason = "its files cannot be locked (No locks available); use a local disk"
    assert f"cannot unpack in {far}: {reason}" in told
    assert (f"cannot use {far / KEY}: {reason}" in told) == is_there
    assert all(_warning(far) in before for before in told_before_a_lock)
    assert told_before_a_lock
    # Only the lock in the other folder is held. A thread still writes that environment to the disk.
    handles = [handle.readlink() for handle in Path("/proc/self/fd").iterdir() if handle.is_symlink()]
    assert [file for file in handles if file.is_relative_to(tmp_path) and file.suffix == ".lock"] == [near / f"{KEY}.lock"]


@pytest.mark.parametrize(
    ("kind", "network"),
    [("fuse.sshfs", "fuse.sshfs"), ("fuse", "fuse"), ("fuse.fuse-overlayfs", ""), ("fuseblk", ""), (None, "fuse")],
)
def test_what_is_behind_fuse_is_told_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None, network: str
) -> None:
    """As the mount of the place's device has it. One that is not listed counts as a network's."""
    monkeypatch.setattr(parts_places, "_file_system", lambda _: 0x65735546)
    device = tmp_path.stat().st_dev
    lines = ["22 1 254:99 / / rw - ext4 /dev/vda rw"]
    if kind:
        lines.append(f"31 22 {os.major(device)}:{os.minor(device)} / /a\\040b rw,nosuid shared:1 master:2 - {kind} host:/x rw")
    (tmp_path / "mountinfo").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(parts_places, "_MOUNTS", str(tmp_path / "mountinfo"))
    assert parts_places.network_of(str(tmp_path)) == network


def test_places_are_looked_for_in_the_documented_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """docs/layouts.md has it: the named folder, the user's cache, then the folders for temporary files."""
    for name in (VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/of")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = f"vllm_env_unpacked_{os.geteuid()}"
    assert parts_places.places() == ["/home/of/.cache/vllm_env/unpacked", f"{tmp_path}/{own}", f"/tmp/{own}"]
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setenv(VARIABLE, "/named")
    assert parts_places.places()[:2] == ["/named", "/cache/vllm_env/unpacked"]
