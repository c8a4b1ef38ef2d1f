"""``--platform`` of another machine: its lock and its wheelhouse are made here, from an index that has wheels for both."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from support import small_build
from support.package_index import PackageIndex, serving
from support.small_fixtures import workspace_in
from support.wheels import write_wheel
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.machine import PLATFORMS, this_platform
from vllm_env.base.network import Network, PipConfig
from vllm_env.lock.lock import LockOptions, lock_beside, make_lock
from vllm_env.lock.pylock import read_pylock
from vllm_env.lock.spec import Overrides, load_spec
from vllm_env.triton.root import rules_of
from vllm_env.wheelhouse import _fetch_wheels

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OTHER = next(platform for platform in PLATFORMS.values() if platform != this_platform())
SPEC = """\
[profile.cpu]
vllm = "0.99.0"
python = "3.11"
requirements = ["setuptools"]
"""


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """An index whose vllm has other bytes for each kind of machine; yields its folder and address."""
    folder = tmp_path / "registry"
    folder.mkdir()
    for platform in PLATFORMS.values():
        made = write_wheel(
            folder, "vllm", "0.99.0", {"vllm/__init__.py": platform.name.encode()}, ("only-arm; platform_machine=='aarch64'",)
        )
        shutil.move(folder / made.file, folder / f"vllm-0.99.0-cp38-abi3-manylinux_2_28_{platform.machine}.whl")
    for name, version in (("numpy", "1.999.0"), ("setuptools", "9999.0"), ("only_arm", "1.0")):
        write_wheel(folder, name, version, {f"{name}/__init__.py": b""})
    with serving(PackageIndex(folder)) as url:
        yield folder, url


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    (tmp_path / "spec").mkdir()
    (tmp_path / "spec/small.toml").write_text(SPEC)
    return tmp_path / "spec/small.toml"


def test_the_lock_and_the_wheelhouse_have_the_other_machines_files(
    index: tuple[Path, str], spec_file: Path, small_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is next to the spec, beside this machine's; from the folder alone it comes out again."""
    folder, url = index
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": url, "PIP_FIND_LINKS": ""}.items():
        monkeypatch.setenv(name, value)
    workspace = workspace_in(small_cache, Network(PipConfig(index_url=url)))
    locks = {}
    for platform in PLATFORMS.values():
        spec = load_spec("cpu", Overrides(), spec_file, platform.name)
        lock = locks[platform] = make_lock(workspace, spec, rules_of("24.10"), LockOptions())
        (vllm,) = [wheel for wheel in lock.wheels if wheel.name == "vllm"]
        assert vllm.file == f"vllm-0.99.0-cp38-abi3-manylinux_2_28_{platform.machine}.whl"
        assert vllm.sha256 == file_sha256(folder / vllm.file)
        assert ("only-arm" in lock.versions()) is (platform.machine == "aarch64")
        assert read_pylock(lock_beside(spec_file, "cpu", platform)).wheels == lock.wheels
    other = locks[OTHER]
    assert other.conda.packages == ()
    assert other.python == "3.11"
    house = tmp_path / "house"
    _fetch_wheels(workspace, other, house)
    assert {file.name: file_sha256(file) for file in house.iterdir()} == {wheel.file: wheel.sha256 for wheel in other.wheels}
    offline = workspace_in(small_cache, Network(PipConfig(), offline=True, wheelhouse=house))
    again = make_lock(offline, other.spec, rules_of("24.10"), LockOptions(upgrade=True))
    assert again.digest == other.digest


@pytest.mark.long
def test_a_build_for_the_other_machine_is_refused_with_what_can_be_done_here(
    index: tuple[Path, str], spec_file: Path, small_cache: Path, tmp_path: Path
) -> None:
    """Before anything is fetched; a dry run resolves its lock."""
    variables = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": index[1], "PIP_FIND_LINKS": ""}
    options = ("--spec", spec_file, "--platform", OTHER.name)
    done = small_build.build(small_cache, tmp_path / "models", *options, **variables)
    assert done.returncode == 2
    assert f"--platform {OTHER.name}: this machine cannot run that environment." in done.stderr
    assert f"./gen_vllm_env.sh wheelhouse DIR --platform {OTHER.name}" in done.stderr
    done = small_build.build(small_cache, tmp_path / "models", *options, "--dry-run", **variables)
    assert done.returncode == 0, done.stderr
