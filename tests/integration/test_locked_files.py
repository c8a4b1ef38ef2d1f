"""The files that a lock names come from whichever index has them: real uv and pip, and indexes of our own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from support.package_index import PackageIndex, serving
from support.small_build import small_lock
from support.small_fixtures import workspace_in
from support.wheels import write_wheel
from vllm_env import wheelhouse
from vllm_env.base import network as network_module
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.network import Network, NetworkError, read_pip_config
from vllm_env.base.process import run
from vllm_env.lock.pylock import PYTORCH_INDEX, Lock, LockedWheel
from vllm_env.prefix import prefix as prefix_module
from vllm_env.prefix.prefix import make_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from support.small_fixtures import Channel

NAME, FILE = "some-tool", "some_tool-1.0-py3-none-any.whl"
PASSWORD = "kept-to-ourselves"


class Lab:
    """Indexes, what pip is configured with, and the two ways to get the files of a lock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self._patch, self._stack = monkeypatch, stack
        self._runs = 0

    def wheel(self, place: str, content: str, name: str = "some_tool", version: str = "1.0") -> LockedWheel:
        """Write a wheel into a folder, and return it as an index's wheel in a lock."""
        (self.folder / place).mkdir(exist_ok=True)
        wheel = write_wheel(self.folder / place, name, version, {f"{name}.py": content.encode()})
        return replace(wheel, name=name.replace("_", "-"), url="")

    def index(self, place: str) -> PackageIndex:
        """Return an index of a folder."""
        return PackageIndex(self.folder / place)

    def serve(self, *indexes: PackageIndex) -> list[str]:
        """Serve indexes, with a password in each URL."""
        urls = [self._stack.enter_context(serving(index)) for index in indexes]
        return [url.replace("://", f"://user:{PASSWORD}@") for url in urls]

    def network(self, urls: Sequence[str], *links: str) -> Network:
        """Configure pip with indexes and find-links folders, and return the network of a build."""
        self._patch.setenv("PIP_INDEX_URL", urls[0])
        self._patch.setenv("PIP_EXTRA_INDEX_URL", " ".join(urls[1:]))
        self._patch.setenv("PIP_FIND_LINKS", " ".join(str(self.folder / link) for link in links))
        return Network(read_pip_config())

    def install(self, network: Network, *wheels: LockedWheel) -> dict[str, str]:
        """Install a lock as a build does; return the installed files of the packages by name."""
        self._runs += 1
        venv = self.folder / f"venv-{self._runs}"
        subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", venv], check=True)
        workspace = workspace_in(self.cache, network)
        with workspace.cache.staging() as staging:
            prefix_module._install_wheels(workspace, lock_of(*wheels), venv, staging)
        return {file.stem: file.read_text() for file in venv.glob("lib/*/site-packages/*.py")}

    def fill(self, network: Network, *wheels: LockedWheel) -> dict[str, str]:
        """Fill a wheelhouse with a lock, install it from there; return as :meth:`install` does."""
        house = self.folder / "house"
        wheelhouse._fetch_wheels(workspace_in(self.cache, network), lock_of(*wheels), house)
        assert {file.name for file in house.iterdir()} == {wheel.file for wheel in wheels}
        return self.install(Network(wheelhouse=house), *wheels)

    def leftovers(self) -> list[Path]:
        """Return the files that a failure has left in the cache and the wheelhouse."""
        places = (self.cache / "build", self.folder / "house")
        return [path for place in places if place.exists() for path in place.iterdir()]


def lock_of(*wheels: LockedWheel) -> Lock:
    """A lock of some wheels, for the cpu profile."""
    lock = small_lock()
    return replace(lock, wheels=wheels, spec=replace(lock.spec, torch_backend="cpu"))


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """With empty caches, and without this machine's configuration."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with contextlib.ExitStack() as stack:
        yield Lab(tmp_path, monkeypatch, stack)


@pytest.fixture(params=["install", "fill"])
def way(request: pytest.FixtureRequest, lab: Lab) -> Callable[..., dict[str, str]]:
    """A build, or ``wheelhouse``."""
    return getattr(lab, request.param)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that are started on the way to the network."""
    started: list[str] = []

    def recorded(argv: Sequence[object], **options: object) -> str:
        started.append("pip" if "pip" in argv[:4] and argv[1] == "-I" else "uv")
        return run(argv, **options)

    monkeypatch.setattr(network_module, "run", recorded)
    return started


@pytest.mark.parametrize("order", [("good", "other"), ("other", "good")])
@pytest.mark.parametrize("has_hashes", [True, False])
def test_the_hash_decides_and_not_the_order(
    lab: Lab, way: Callable[..., dict[str, str]], order: tuple[str, str], has_hashes: bool
) -> None:
    """Two indexes have another file of the same version; a page may have no hashes."""
    wanted = lab.wheel("good", "right")
    lab.wheel("other", "wrong")
    indexes = [lab.index(place) for place in order]
    if not has_hashes:
        for index in indexes:
            index.announced = {FILE: ""}
    assert way(lab.network(lab.serve(*indexes)), wanted) == {"some_tool": "right"}
    assert not (lab.cache / "build").exists() or not list((lab.cache / "build").iterdir())


def test_several_files_of_one_index_are_others(lab: Lab, way: Callable[..., dict[str, str]]) -> None:
    """uv names one of them only, so each is found in turn; one that fits is not asked for again."""
    names = ("first", "second", "third")
    wanted = [lab.wheel("good", f"right {name}", name) for name in names]
    both = lab.wheel("good", "both", "both")
    lab.wheel("other", "both", "both")
    for name in names:
        lab.wheel("other", "wrong", name)
    network = lab.network(lab.serve(lab.index("good"), lab.index("other")))
    assert way(network, *wanted, both) == {"both": "both", **{name: f"right {name}" for name in names}}


@pytest.mark.parametrize("file", ["the same name", "another name"])
def test_a_file_that_only_a_folder_has(lab: Lab, way: Callable[..., dict[str, str]], file: str) -> None:
    """A find-links folder has no hashes: pip alone would prefer the index."""
    wanted = lab.wheel("links", "right")
    lab.wheel("other", "wrong")
    if file == "another name":
        other = lab.folder / "other" / FILE
        other.rename(other.with_name(f"some_tool-1.0-py{sys.version_info[0]}11-none-any.whl"))
    assert way(lab.network(lab.serve(lab.index("other")), "links"), wanted) == {"some_tool": "right"}


def test_an_index_that_only_uv_is_configured_with(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip, which finds the file, is told of it."""
    wanted = lab.wheel("good", "right")
    lab.wheel("other", "wrong")
    other, good = lab.serve(lab.index("other"), lab.index("good"))
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"company={good}")
    network = lab.network(["", other])
    assert network.pip.index_url == ""
    assert lab.install(network, wanted) == {"some_tool": "right"}


def test_a_constraint_of_pip_does_not_count(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with uv: the lock decides about versions."""
    wanted = lab.wheel("good", "right")
    lab.wheel("other", "wrong")
    (lab.folder / "constraints.txt").write_text("some-tool<1\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(lab.folder / "constraints.txt"))
    network = lab.network(lab.serve(lab.index("good"), lab.index("other")))
    assert lab.install(network, wanted) == {"some_tool": "right"}


def test_a_build_of_torch_that_its_own_index_has(lab: Lab, way: Callable[..., dict[str, str]]) -> None:
    """The cpu profile: another build of this name is in the user's index; PyTorch's index, or its mirror, has the locked one."""
    wanted = replace(lab.wheel("mirror", "right", "torch", "9.9.9+cpu"), index=PYTORCH_INDEX)
    lab.wheel("other", "wrong", "torch", "9.9.9+cpu")
    other, mirror = lab.serve(lab.index("other"), lab.index("mirror"))
    network = replace(lab.network([other]), torch_index=mirror)
    assert way(network, wanted) == {"torch": "right"}


_DAMAGED = "has this file damaged or repacked, with sha256 "
_BAD: dict[str, tuple[dict[str, object], str]] = {
    "repacked": ({"place": "other"}, _DAMAGED),
    "another than announced": ({"place": "other", "announced": True}, _DAMAGED),
    "truncated": ({"cut": 40}, _DAMAGED),
    "interrupted": ({"cut": 40, "is_interrupted": True}, "fails: "),
    "403": ({"status": 403}, "answers 403 Client Error: Forbidden"),
    "403 for the file": ({"file_status": 403}, "fails: HTTP error 403 while getting "),
    "HTML": ({"page": "<html><body>Please log in.</body>"}, f"lists no fitting file of {NAME} 1.0"),
    "missing": ({"place": "none"}, "answers 404 Client Error: Not Found"),
    "another version": ({"place": "new"}, f"lists no fitting file of {NAME} 1.0"),
}
"""What is wrong with an index, and what the message says of it."""


@pytest.mark.parametrize(("means", "case"), [*(("install", case) for case in _BAD), ("fill", "truncated"), ("fill", "403")])
def test_a_bad_index_is_named_and_nothing_is_left(lab: Lab, means: str, case: str) -> None:
    """File, index and what it has, without the password; as soon as the index is good, it works, with the same caches."""
    way: Callable[..., dict[str, str]] = getattr(lab, means)
    wrong, told = _BAD[case]
    wanted = lab.wheel("good", "right")
    lab.wheel("other", "wrong")
    lab.wheel("new", "newer", version="2.0")
    index = lab.index("good")
    good = dict(vars(index))
    (url,) = lab.serve(index)
    network = lab.network([url])
    changes = dict(wrong)
    index.folder = lab.folder / str(changes.pop("place", "good"))
    if changes.pop("announced", False):
        index.announced = {FILE: wanted.sha256}
    vars(index).update(changes)
    with pytest.raises(VllmEnvError) as caught:
        way(network, wanted)
    assert caught.value.what == f"No index has the locked file {FILE} with sha256 {wanted.sha256}."
    assert caught.value.cause.startswith(f"{url.replace(f'user:{PASSWORD}', '****')} {told}")
    lines = caught.value.lines()
    assert len(lines) == 3
    assert PASSWORD not in "\n".join(lines)
    assert lab.leftovers() == []
    vars(index).update(good)
    assert way(network, wanted) == {"some_tool": "right"}


def test_each_index_is_named_with_what_it_has(lab: Lab, way: Callable[..., dict[str, str]]) -> None:
    """One has another file, one refuses, one has a third file, as a folder has."""
    wanted = lab.wheel("good", "right")
    other, linked = lab.wheel("other", "wrong"), lab.wheel("links", "wrong, too")
    refusing = lab.index("good")
    refusing.status = 403
    network = lab.network(lab.serve(lab.index("other"), refusing, lab.index("links")), "links")
    with pytest.raises(CommandError) as caught:
        way(network, wanted)
    first, second, third, fourth = caught.value.cause.split("; ")
    assert first.endswith(f"/simple has this file damaged or repacked, with sha256 {other.sha256}")
    assert second.endswith("/simple answers 403 Client Error: Forbidden")
    assert third.endswith(f"/simple has this file damaged or repacked, with sha256 {linked.sha256}")
    assert fourth == f"{lab.folder / 'links'} has this file damaged or repacked, with sha256 {linked.sha256}."
    assert "--upgrade" in caught.value.remedy


def test_a_wheelhouse_with_another_file_is_named(lab: Lab) -> None:
    """No index is asked: the folder is the only source."""
    wanted = lab.wheel("good", "right")
    other = lab.wheel("house", "wrong")
    index = lab.index("good")
    network = replace(lab.network(lab.serve(index)), wheelhouse=lab.folder / "house")
    with pytest.raises(VllmEnvError, match=f"does not have the locked file {FILE}") as caught:
        lab.install(network, wanted)
    assert caught.value.cause == f"It has {FILE} with sha256 {other.sha256}."
    (lab.folder / "house" / FILE).unlink()
    with pytest.raises(VllmEnvError, match="does not have the locked file") as caught:
        lab.install(network, wanted)
    assert caught.value.cause == f"It has no file of {NAME}."
    assert index.requests == []


def test_a_wheelhouse_with_a_file_that_cannot_be_unpacked_tells_why(lab: Lab) -> None:
    """The error is uv's own: the folder has the locked file, which was published like that."""
    wanted = lab.wheel("house", "right")
    file = lab.folder / "house" / FILE
    file.write_bytes(file.read_bytes()[:-40])
    published = replace(wanted, sha256=file_sha256(file))
    with pytest.raises(CommandError) as caught:
        lab.install(Network(wheelhouse=lab.folder / "house"), published)
    assert "does not have the locked file" not in str(caught.value)
    assert FILE in caught.value.tail


def test_offline_nothing_is_asked(lab: Lab, programs: list[str]) -> None:
    """Only uv runs, with what it and the folders have."""
    wanted = lab.wheel("good", "right")
    lab.wheel("links", "wrong")
    index = lab.index("good")
    network = replace(lab.network(lab.serve(index), "links"), offline=True)
    with pytest.raises(CommandError, match="install the wheels of the lock"):
        lab.install(network, wanted)
    assert index.requests == []
    assert programs == ["uv"]


def test_a_host_that_does_not_answer_is_not_asked_for_each_file(lab: Lab, programs: list[str]) -> None:
    """It would not answer then, either."""
    wanted = lab.wheel("good", "right")
    failing = lab.index("good")
    failing.status = 503
    for url in ("http://127.0.0.1:9/simple", *lab.serve(failing)):
        with pytest.raises(NetworkError, match="the network failed") as caught:
            lab.install(lab.network([url]), wanted)
        assert url.rpartition("@")[2].removeprefix("http://") in caught.value.tail
        assert PASSWORD not in str(caught.value.lines())
    assert programs == ["uv", "uv"]


def test_with_nothing_to_repair_nothing_is_started_or_asked_in_addition(lab: Lab, programs: list[str]) -> None:
    """One uv, which asks for one page and one file."""
    wanted = lab.wheel("good", "right")
    index = lab.index("good")
    assert lab.install(lab.network(lab.serve(index)), wanted) == {"some_tool": "right"}
    assert programs == ["uv"]
    assert index.requests == ["/simple/some-tool/", f"/files/{FILE}"]


def test_the_prefix_is_the_same(lab: Lab, channel: Channel, tmp_path: Path) -> None:
    """Where a file came from is not seen in the environment."""
    wanted = lab.wheel("good", "right")
    lab.wheel("other", "wrong")
    urls = lab.serve(lab.index("good"), lab.index("other"))
    lock = replace(lock_of(wanted), conda=channel.layer)
    trees = []
    for number, asked in enumerate((urls[:1], urls)):
        root = tmp_path / f"cache-{number}"
        (root / "conda").mkdir(parents=True)
        (root / "conda" / "channel").symlink_to(channel.root / "conda" / "channel")
        trees.append(make_prefix(workspace_in(root, lab.network(asked)), lock).path)
    subprocess.run(["diff", "--recursive", "--no-dereference", *trees], check=True)
