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

from support.small_parts import KEY, SITE, Small, make_small
from vllm_env.inside.parts_places import VARIABLE

pytestmark = pytest.mark.long

_UNPACKING, _FOUND = "processes into", "is unpacked in"


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
