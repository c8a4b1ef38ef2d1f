"""The stub from source, the whole way: git clone, CMake, a C++ compiler, the ELF checks, a start and the cache."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.git_organisation import make_organisation
from support.listener import Listener
from support.small_fixtures import workspace_in
from vllm_env.base.elf import read_dynamic_section
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.network import Network
from vllm_env.base.report import reporting_to
from vllm_env.base.workspace import Workspace
from vllm_env.prefix.relocate import install_runtime
from vllm_env.triton.root import TritonRoot, rules_of
from vllm_env.triton.stub import choose_stub, make_stub
from vllm_env.triton.stub_source import StubOptions
from vllm_env.verify.launcher_check import start

if TYPE_CHECKING:
    from support.small_fixtures import Channel
    from vllm_env.triton.stub import Stub


@dataclasses.dataclass(frozen=True)
class Place:
    """What the tests of this module share: a prefix, a workspace, its Python's version, and pybind11 from the registry."""

    workspace: Workspace
    prefix: Path
    python: str
    pybind11: dict[str, Path]
    triton: TritonRoot

    def build(self, options: StubOptions, release: str = "24.10") -> Stub:
        """Plan a stub from source and make it."""
        triton = dataclasses.replace(self.triton, release=release, rules=rules_of(release))
        return make_stub(self.workspace, choose_stub(self.workspace, triton, self.python, "source", options), self.prefix)


# As in the releases' CMakeLists.txt; with 2.10 the embedded interpreter does not configure its locale.
PYBIND11 = {"24.10": "2.10.4", "24.11": "2.12.1"}


@pytest.fixture(scope="module")
def place(channel: Channel, bare_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("stub")
    for release, version in PYBIND11.items():
        install: list[str | Path] = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", folder / release]
        subprocess.run([*install, f"pybind11=={version}"], check=True)
    triton = TritonRoot(folder / "triton", "24.10", rules_of("24.10"))
    pybind11 = {release: folder / release / "pybind11" for release in PYBIND11}
    return Place(workspace_in(folder / "cache", Network()), bare_prefix, channel.layer.python, pybind11, triton)


@pytest.fixture(scope="module")
def organisation(place: Place) -> StubOptions:
    folder = place.workspace.cache.root.with_name("organisation")
    return StubOptions(git_url=make_organisation(folder, place.pybind11["24.10"]))


def test_builds_checks_starts_and_caches_a_stub(place: Place, organisation: StubOptions) -> None:
    """A stub built at the release's branch embeds the prefix's Python, keeps no build path, and is built once."""
    cache, console = place.workspace.cache, Listener()
    choice = choose_stub(place.workspace, place.triton, place.python, "auto", organisation)
    assert choice.prebuilt is None
    with reporting_to(console):
        stub = make_stub(place.workspace, choice, place.prefix)

    assert (stub.origin, stub.python, stub.release) == ("source", "3.11", "24.10")
    assert stub.path
    needs = read_dynamic_section(stub.path)
    assert needs is not None
    assert any(name.startswith("libpython3.11.so") for name in needs.needed)
    assert (needs.rpath, needs.runpath) == ((), ("$ORIGIN/stub_lib",))
    assert str(cache.path("build")).encode() not in stub.path.read_bytes()
    log = next(cache.path("logs").glob("stub-r24.10-*.log")).read_text()
    for part in ("BACKEND", "COMMON", "CORE"):
        assert f"tag of {part}: r24.10" in log
    assert f"organisation: {organisation.git_url}" in log
    assert "gpu: OFF" in log
    assert any(re.match(r"\[\d+/\d+\]", step) for step in console.heard)
    assert list(cache.path("build").iterdir()) == []

    version, prefix, _ = _embedded(stub.path, place.prefix)
    assert version == f"common {place.python}"
    assert Path(prefix) == place.prefix

    before = stub.path.stat().st_mtime_ns
    offline = Workspace(cache, Network(offline=True))
    console.heard.clear()
    with reporting_to(console):
        again = make_stub(offline, choose_stub(offline, place.triton, place.python, "auto", organisation), place.prefix)
    assert again == stub
    assert stub.path.stat().st_mtime_ns == before
    assert console.heard == []


@pytest.mark.parametrize("release", PYBIND11)
def test_the_start_check_stands_for_an_embedded_interpreter(
    release: str, place: Place, organisation: StubOptions, tmp_path: Path
) -> None:
    """A stub with the release's pybind11 reads files as UTF-8 with the start-up hook; without it, as the check says."""
    options = organisation
    if release != "24.10":
        options = StubOptions(git_url=make_organisation(tmp_path, place.pybind11[release], release=release))
    stub = place.build(options, release)
    bare = start(place.workspace, place.prefix, (), activates=False).encoding
    if release == "24.10":  # later ones have the interpreter configure its locale
        assert _embedded(stub.path, place.prefix)[2] == bare == "ANSI_X3.4-1968"

    with_hook = tmp_path / "env"
    shutil.copytree(place.prefix, with_hook, symlinks=True)
    install_runtime(with_hook, "a" * 64)
    assert start(place.workspace, with_hook, (), activates=False).encoding == "UTF-8"
    assert _embedded(stub.path, with_hook)[2].upper() == "UTF-8"


def _embedded(stub: Path, prefix: Path) -> list[str]:
    """Start a stub as Triton does since 25.08; return its Python's version, prefix and encoding of files."""
    variables = {"LD_LIBRARY_PATH": f"{prefix}/lib", "PATH": f"{prefix}/bin:/usr/bin:/bin", "VIRTUAL_ENV": str(prefix)}
    answer = subprocess.run([stub, *"abcdefgh"], env=variables, capture_output=True, text=True, check=True)
    lines = answer.stdout.splitlines()
    return [lines[0].partition(" (")[0], *lines[-2:]]


def test_refuses_a_release_without_branch(place: Place, organisation: StubOptions) -> None:
    """A release that the organisation does not have is refused before the build, by its branch's name and with a remedy."""
    triton = dataclasses.replace(place.triton, release="24.09")
    with pytest.raises(VllmEnvError, match=r"no branch r24\.09.*--triton-git-url"):
        choose_stub(place.workspace, triton, place.python, "source", organisation)


def test_refuses_an_organisation_that_is_not_there(place: Place, tmp_path: Path) -> None:
    """A mirror that does not answer is named, with git's reason and the option that names another."""
    with pytest.raises(CommandError, match=r"cannot be reached.*--triton-git-url") as caught:
        place.build(StubOptions(git_url=str(tmp_path / "nothing")))
    assert str(tmp_path / "nothing") in caught.value.what


def test_keeps_and_names_the_log_of_a_failed_build(place: Place, tmp_path: Path) -> None:
    """A compile error ends in a message that names the log, the log holds the compiler's words, and nothing is cached."""
    url = make_organisation(tmp_path, place.pybind11["24.10"], stub="int main() { return one; }\n")
    with pytest.raises(CommandError) as caught:
        place.build(StubOptions(git_url=url))
    log = Path(re.search(r"(/\S+\.log)", caught.value.cause)[1])  # type: ignore[index]
    assert "'one' was not declared" in log.read_text().replace("‘", "'").replace("’", "'")  # noqa: RUF001 - g++'s quotes
    assert caught.value.remedy
    assert list(place.workspace.cache.path("build").iterdir()) == []
    with pytest.raises(CommandError):
        place.build(StubOptions(git_url=url))
