"""The pages' Docker lines as they are written, in a real container on an ordinary registry: no wheel folder, no compiler."""

from __future__ import annotations

import functools
import http.server
import re
import shlex
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from support import containers, pages
from support.patience import wait_for
from support.repositories import BUILD_SECONDS, CHECKOUT
from support.small_parts import KEY, SITE, USE, make_small
from vllm_env.base.network import Network, read_pip_config
from vllm_env.lock.pylock import read_pylock
from vllm_env.serve.server import free_ports
from vllm_env.serve.server_log import telling_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3 * BUILD_SECONDS)]

_READY_SECONDS = 600
_OTHER = "12345:12345"  # a user whom neither this machine nor the image knows


@pytest.fixture(scope="module")
def folder(session_folder: Path) -> Path:
    """Where the clones are."""
    containers.require_podman()
    (session_folder / "containers").mkdir()
    return session_folder / "containers"


@pytest.fixture(scope="module")
def torch_index(folder: Path) -> Iterator[str]:
    """An index on 127.0.0.1 with the locked build of torch and nothing else, in place of the PyTorch project's."""
    wheels = read_pylock(CHECKOUT / "env" / "pylock.vllm_env-cpu.toml").wheels
    (torch,) = (wheel for wheel in wheels if wheel.index)
    (folder / "index" / torch.name).mkdir(parents=True)
    (folder / "torch.txt").write_text(f"{torch.requirement}\n")
    options = ["--no-deps", "--require-hashes", "--python-version", "3.11", "--only-binary", ":all:"]
    places = ["--dest", folder / "index" / torch.name, "--requirement", folder / "torch.txt"]
    Network(read_pip_config()).pip_command(["download", *options, *places], "fetch torch", torch_backend="cpu")
    handler = functools.partial(_Quiet, directory=str(folder / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"VLLM_ENV_TORCH_INDEX=http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@dataclass(frozen=True)
class Built:
    """A clone in which README's first line was run, and how that ended."""

    clone: Path
    done: subprocess.CompletedProcess[str]


def _clone(place: Path) -> Path:
    subprocess.run(["git", "clone", "--quiet", CHECKOUT, place], check=True)
    return place


def _line(pattern: str, clone: Path, home: Path, *options: str) -> list[str]:
    """A page's line for a clone as its current folder; options come before those of the line."""
    return [*options, *containers.as_podman(containers.page_line(pattern), {"PWD": str(clone), "HOME": str(home)})]


@pytest.fixture(scope="module")
def built(folder: Path, torch_index: str) -> Built:
    """README's first line in a fresh clone; the network is the host's because the index is on its 127.0.0.1."""
    clone = _clone(folder / "clone")
    variables = ["--env", torch_index, "--env", "HF_ENDPOINT=http://127.0.0.1:9"]  # no model hub: the stand-in is served next
    done = containers.run_line(_line(pages.BUILD, clone, folder, "--network", "host", *variables))
    return Built(clone, done)


def test_the_first_line_builds_serves_and_asks(built: Built) -> None:
    """On an ordinary registry, in an image without libnuma, git, cmake and compiler: the answers and PASS."""
    assert built.done.returncode == 0, built.done.stderr
    assert "PASS: vLLM example" in built.done.stdout.splitlines()
    assert (built.clone / "model_repository/vllm/vllm_env.tar.gz").is_file()


def test_the_second_line_serves_as_another_user(built: Built, folder: Path) -> None:
    """A user without a home, from a repository that cannot be written; the client asks from outside the container."""
    ports = containers.host_ports()
    line = containers.as_podman(containers.page_line(pages.SERVE), {"PWD": str(built.clone)}, ports=ports)
    line[line.index(f"{built.clone}/model_repository:/models")] += ":ro"
    log = folder / "server.log"
    with containers.running(["--user", _OTHER, "--env", "HOME=/", *line], log) as server:
        _wait_until_ready(server, ports[8000], log)
        ask = [sys.executable, "client/client.py", "--iterations", "10", "--url", f"127.0.0.1:{ports[8001]}"]
        done = subprocess.run(ask, cwd=built.clone, capture_output=True, text=True, check=False, timeout=_READY_SECONDS)
    assert done.returncode == 0, done.stderr + telling_lines(log)
    assert done.stdout.splitlines()[-1] == "PASS: vLLM example"
    assert "Paris, on the river Seine." in (built.clone / "results.txt").read_text("utf-8")


def test_the_port_is_published_with_its_key(built: Built, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/docker.md's lines: what is added to the configuration, and the one that serves; without the key it answers 401."""
    page = (CHECKOUT / "docs/docker.md").read_text("utf-8")
    (added,) = re.findall(r"^cat >> model_repository/vllm/config.pbtxt <<'END'\n(.*?)^END$", page, re.DOTALL | re.MULTILINE)
    config = built.clone / "model_repository/vllm/config.pbtxt"
    before = config.read_text("utf-8")
    config.write_text(before + added)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    ports = {**containers.host_ports(), 9000: free_ports().http}
    (folder / "cache").mkdir()
    typed = containers.page_line(pages.PORT).replace("--name vllm ", "").replace(" -d ", " -it ")
    line = containers.as_podman(typed.replace("vllm_cache:", f"{folder}/cache:"), {"PWD": str(built.clone)}, ports=ports)
    log = folder / "port.log"
    try:
        with containers.running(line, log) as server:
            _wait_until_ready(server, ports[8000], log)
            url = f"http://127.0.0.1:{ports[9000]}/v1/models"
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(url, timeout=60)
            asked = urllib.request.Request(url, headers={"Authorization": "Bearer secret"})
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert b'"vllm"' in answer.read()
    finally:
        config.write_text(before)


def _wait_until_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    def is_ready() -> bool:
        assert server.poll() is None, telling_lines(log)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=60):
                return True
        except OSError:
            return False

    wait_for(is_ready, lambda: f"the server: {telling_lines(log)}", limit=_READY_SECONDS, longest_pause=0.5)


def test_with_a_mounted_cache_the_second_build_takes_nothing_from_the_network(folder: Path, torch_index: str) -> None:
    """It has no network at all, and knows the answers that a container which is gone has got. A smoke run reuses the prefix."""
    cache = folder / "home/.cache/vllm_env"
    cache.mkdir(parents=True)
    line = _line(pages.BUILD_WITH_CACHE, _clone(folder / "cached"), folder / "home")
    first = containers.run_line(["--network", "host", "--env", torch_index, *line])
    assert first.returncode == 0, first.stderr
    made = _made(cache)
    second = containers.run_line(["--network", "none", *line])
    assert second.returncode == 0, second.stderr
    assert "is up to date; nothing to build" in second.stderr
    assert second.stdout.startswith("the smoke run of 20")
    assert "PASS: vLLM example" in second.stdout.splitlines()
    third = containers.run_line(["--network", "none", *line, "--smoke-run"])
    assert "PASS: vLLM example" in third.stdout.splitlines()
    assert re.search(r"^prefix .* reused$", third.stderr, re.MULTILINE), third.stderr
    assert _made(cache) == made
    assert "tools " not in second.stderr


def _made(cache: Path) -> tuple[Path, int]:
    """Return the cache's only finished prefix, and when it was finished (ns since 1970)."""
    (finished,) = cache.glob("prefixes/*/.complete")
    return finished, finished.stat().st_ctime_ns


def test_another_user_builds_in_a_checkout_of_its_own(folder: Path, torch_index: str) -> None:
    """The container knows no such user and its home is ``/``, which cannot be written."""
    clone = _clone(folder / "other")
    given = containers.run_in(containers.image(), "chown", "-R", _OTHER, "/work", options=("--volume", f"{clone}:/work"))
    assert given.returncode == 0, given.stderr
    options = ["--network", "host", "--user", _OTHER, "--env", "HOME=/", "--env", torch_index]
    done = containers.run_line([*_line(pages.BUILD, clone, folder, *options), "--no-smoke-run"])
    assert done.returncode == 0, done.stderr
    assert "Permission" not in done.stderr
    assert "vLLM 0." in done.stdout
    archive = clone / "model_repository/vllm/vllm_env.tar.gz"
    assert archive.stat().st_uid == clone.stat().st_uid


@pytest.mark.parametrize("where", ["a server in `docker run --rm`", "a read-only root file system"])
def test_a_volume_keeps_what_a_removed_container_has_unpacked(folder: Path, where: str) -> None:
    """The options of docs/layouts.md as they are, on an environment of three files; without them, nothing is kept."""
    place = folder / re.sub(r"\W+", "-", where)
    place.mkdir()
    small = make_small(place)
    (small.folder / "bin/python").unlink()
    (small.folder / "bin/python").symlink_to("/usr/bin/python3")
    (place / "volume").mkdir()
    page = (CHECKOUT / "docs/layouts.md").read_text("utf-8")
    (row,) = re.findall(rf"^\| {re.escape(where)} \| add `(.+?)`", page, re.MULTILINE)
    options = shlex.split(row.replace("vllm_env:", f"{place / 'volume'}:"))
    code = USE.replace("input()", "")
    command = ["python3", "-I", "-S", "-c", code, str(small.folder / SITE), str(small.model), str(small.folder)]
    mounted = ["--volume", f"{place}:{place}:ro"]
    unpacks, finds = "vllm_env: unpacking", "vllm_env: the environment is unpacked in"
    for given, expected in ((options, unpacks), (options, finds), ([], unpacks)):
        done = containers.run_in(containers.image(), *command, options=("--rm", *given, *mounted), network="none")
        assert done.returncode == 0, done.stderr
        assert expected in done.stderr
    assert list((place / "volume").rglob(f"{KEY}/{SITE}/one.py"))


def test_a_wheelhouse_is_enough_without_network(folder: Path, torch_index: str) -> None:
    """Filled in one container, with the network; a fresh clone in another, without, comes from its bootstrap to PASS."""
    house, filler, fresh = folder / "house", _clone(folder / "filler"), _clone(folder / "fresh")
    house.mkdir()
    at = ("--volume", f"{house}:/house", "--workdir", "/work")
    fill = shlex.split(containers.page_line(pages.FILL).replace("$DIR", "/house"), comments=True)
    options = ("--env", torch_index, "--volume", f"{filler}:/work", *at)
    filled = containers.run_in(containers.image(), *fill, options=options)
    assert filled.returncode == 0, filled.stderr
    build = shlex.split(containers.page_line(pages.BUILD_OFFLINE).replace("$DIR", "/house"), comments=True)
    done = containers.run_in(containers.image(), *build, options=("--volume", f"{fresh}:/work", *at), network="none")
    assert done.returncode == 0, done.stderr
    assert "PASS: vLLM example" in done.stdout.splitlines()
