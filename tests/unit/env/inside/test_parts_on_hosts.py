"""The places of docs/layouts.md, "Containers and hosts": each line of it is tried here with real mounts and users."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from support.namespaces import with_mounts
from support.small_parts import KEY, SITE, USE, Small, make_small
from vllm_env.inside import parts_worker
from vllm_env.inside.parts_places import VARIABLE

pytestmark = pytest.mark.long

_UNPACKING, _FOUND = "processes into", "is unpacked in"
# The first look at the free space finds enough of it; another program takes it meanwhile.
_FULL = USE.replace("print(unpack.use", "unpack.free = lambda _: 10**12\nprint(unpack.use")


def _in_mounts(script: str, *words: object) -> list[str]:
    """Return what to put before a command, so that it sees the mounts of a script."""
    return [*with_mounts(), "sh", "-ec", f'{script}\nshift {len(words)}\nexec "$@"', "sh", *map(str, words)]


def test_a_container_that_is_removed_unpacks_again_without_a_volume(small: Small, tmp_path: Path) -> None:
    """`docker run --rm`: with a volume, the second container finds what the first one has unpacked."""
    for volume, second in ((None, _UNPACKING), (tmp_path / "volume", _FOUND)):
        for number, expected in ((1, _UNPACKING), (2, second)):
            home = tmp_path / f"container-{bool(volume)}-{number}"
            variables = {"HOME": str(home), "TMPDIR": str(home)}
            if volume is None:
                variables[VARIABLE] = ""
            status, _, log = small.run(volume or home, **variables)
            assert status == 0, log
            assert expected in log


def test_a_volume_that_others_may_write_takes_a_subfolder(small: Small, tmp_path: Path) -> None:
    """As the volume of a pod (emptyDir, mode 0777) and a folder of the host's user are; the log says what to name."""
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    status, out, log = small.run(volume)
    assert status == 0, log
    assert out[0] == str(tmp_path / "home/.cache/vllm_env/unpacked" / KEY)
    assert f"cannot unpack in {volume}: it belongs to another user, or others may write there; name a subfolder of it" in log
    shutil.rmtree(tmp_path / "home")
    status, out, log = small.run(volume / "vllm")
    assert (status, out[0]) == (0, str(volume / "vllm" / KEY)), log
    assert (volume / "vllm").stat().st_mode & 0o777 == 0o700


def test_a_read_only_root_needs_the_volume(small: Small, tmp_path: Path) -> None:
    """With it, the environment is there. Without it, the message names each folder and says what to do."""
    volume = tmp_path / "volume"
    volume.mkdir()
    script = """
        mount --bind "$1" "$1"
        for point in / /root /tmp; do
            mountpoint -q "$point" && mount -o remount,bind,ro "$point"
        done
    """
    launcher = _in_mounts(script, volume)
    nowhere = {"HOME": "/root", "TMPDIR": "/tmp"}
    status, out, log = small.run(volume, *launcher, **nowhere)
    assert status == 0, log
    assert out[0] == str(volume / KEY)
    shutil.rmtree(volume / KEY)
    status, _, log = small.run(volume, *launcher, **nowhere, **{VARIABLE: ""})
    assert status != 0
    assert "Read-only file system" in log
    assert f"Set {VARIABLE} to a folder on a local disk with enough space" in log.splitlines()[-1]


def test_a_disk_that_fills_up_while_it_is_unpacked_is_passed_over(small: Small, tmp_path: Path) -> None:
    """The next folder takes the environment, and nothing of it stays on the full disk."""
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    left = tmp_path / "left"
    script = 'mount -t tmpfs -o size=3m,mode=0700 tmpfs "$1"'
    # What is on the full disk can be seen only by the process that has it mounted.
    code = _FULL.replace("input()", f"import os\nopen({str(left)!r}, 'w').write(repr(os.listdir({str(place)!r})))")
    status, out, log = small.run(place, *_in_mounts(script, place), code=code)
    assert status == 0, log
    assert out[0] == str(tmp_path / "home/.cache/vllm_env/unpacked" / KEY)
    assert f"cannot unpack in {place}: No space left on device" in log
    assert left.read_text() == repr([f"{KEY}.lock"])


def test_a_worker_that_fills_the_disk_says_so(tmp_path: Path) -> None:
    """With the number of the error, also where the copy of the small archive is what fills it."""
    source = tmp_path / "source"
    (source / "lib").mkdir(parents=True)
    for name in ("one", "two"):
        (source / "lib" / name).write_bytes(bytes(2 << 20))
    target = tmp_path / "target"
    target.mkdir()
    argv = [sys.executable, "-I", parts_worker.__file__, "base", str(source), str(target / "tree")]
    mounted = _in_mounts('mount -t tmpfs -o size=3m tmpfs "$1"', target)
    done = subprocess.run([*mounted, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "28 No space left on device\n"


def test_a_full_disk_is_passed_over_before_anything_is_unpacked(small: Small, tmp_path: Path) -> None:
    """The log has what is free and what is needed."""
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    status, out, log = small.run(place, *_in_mounts('mount -t tmpfs -o size=3m,mode=0700 tmpfs "$1"', place))
    assert status == 0, log
    assert out[0] == str(tmp_path / "home/.cache/vllm_env/unpacked" / KEY)
    assert f"cannot unpack in {place}: 0.0 GB are free, 0.1 GB are needed" in log
    assert f"processes into {place}" not in log


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root becomes another user")
def test_two_users_of_a_host_have_a_copy_each() -> None:
    """In the folder for temporary files, which they share; neither runs what the other one can change."""
    with tempfile.TemporaryDirectory(prefix="vllm_env_test_") as folder:
        place = Path(folder)
        place.chmod(0o755)
        small = make_small(place)
        shared = place / "tmp"
        shared.mkdir()
        shared.chmod(0o1777)
        # The interpreter of the tests may be in a folder that only root enters.
        python = small.folder / "bin/python"
        python.unlink()
        shutil.copy(Path(sys.base_prefix, "bin/python3").resolve(), python)
        trees = []
        for user in (12345, 23456):
            launcher = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
            probe = subprocess.run([*launcher, sys.executable, "-c", ""], capture_output=True, check=False)
            if probe.returncode:
                pytest.skip(f"another user cannot run {shlex.quote(sys.executable)}")
            status, out, log = small.run(shared, *launcher, **{VARIABLE: "", "HOME": "/", "TMPDIR": str(shared)})
            assert status == 0, log
            assert _UNPACKING in log
            trees.append(Path(out[0]))
            assert (trees[-1] / SITE / "one.py").stat().st_uid == user
        assert trees == [shared / f"vllm_env_unpacked_{user}" / KEY for user in (12345, 23456)]
        assert {tree.parent.stat().st_mode & 0o777 for tree in trees} == {0o700}
