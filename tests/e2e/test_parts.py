"""An environment in parts on the stock tritonserver: unpacked once on a machine, whole or not at all, and served from there."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import engineless, small_build
from support.mapped import libraries_of, programs_of
from support.model_control import GIVEN_UP
from support.namespaces import with_mounts
from support.official_folder import make_official, snapshot
from support.repositories import BUILD_SECONDS, CHECKOUT, run_build
from support.serving import CPU_ARGUMENTS, READY_SECONDS, STALL_SECONDS, serve, variables_for
from support.starts import TRITON, note_start
from support.triton_client import generate
from vllm_env.serve.server import Launch, TritonServer
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from support.serving import Parts
    from support.small_fixtures import Channel

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif("VLLM_ENV_TEST_ENVIRONMENT" in os.environ, reason="serves an environment that was not built"),
]
UNPACKING, WAITING, FOUND = "processes into", "waiting for it", "the environment is unpacked in"
LIBRARY = "loop.cpython-311-x86_64-linux-gnu.so"  # of uvloop; what NumPy has is also in the file that Triton extracts
STARTING = "[vllm] importing vLLM"  # once, but for a start that gets stuck by a fault of the Python backend and is tried again
PROMPT = {"text_input": "The capital of France is", "parameters": {"temperature": 0, "max_tokens": 16}}


@dataclass(frozen=True)
class Packager:
    """The command line that builds environments in parts: ``options`` say what they contain."""

    environment: Mapping[str, str]
    options: tuple[str, ...] = ()

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; it must succeed."""
        argv = [sys.executable, "-m", "vllm_env", *arguments, *self.options, "--profile", "cpu", "--layout", "parts"]
        environment = {**self.environment, **variables}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS)
        assert done.returncode == 0, done.stderr
        return done


@pytest.fixture(scope="module")
def packager(request: pytest.FixtureRequest, channel: Channel, session_folder: Path) -> Packager:
    """Packs the vLLM without an engine; with `--slow` the one that everybody gets, whose environment is then in the cache."""
    if request.config.getoption("--slow"):
        request.getfixturevalue("built_repository")
        return Packager({**os.environ, "PYTHONPATH": str(CHECKOUT / "env")})
    folder = session_folder / "parts"
    spec = small_build.make_spec(folder / "spec", engineless.make_wheel(folder))
    return Packager(small_build.environment(channel.root), ("--spec", str(spec)))


@pytest.fixture(scope="module")
def repository(packager: Packager, session_folder: Path) -> Path:
    """A model repository in parts."""
    models = session_folder / "parts" / "models"
    packager.run("--no-smoke-run", "--model-repository", str(models))
    return models


@pytest.fixture
def in_parts(light_parts: Parts, repository: Path) -> Parts:
    """What servers are made of, with the environment in parts."""
    return dataclasses.replace(light_parts, model=repository / "vllm")


def answer(server: TritonServer) -> str:
    status, document = generate(server.http_url, PROMPT)
    assert status == 200
    return str(document["text_output"])


def lines(server: TritonServer, text: str) -> int:
    return server.log.read_text(errors="replace").count(text)


@dataclass(frozen=True)
class Started:
    """What one of several servers did: its answer, how often its log has a text, and what its processes have loaded."""

    answer: str
    told: dict[str, int]
    libraries: set[str]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where this test's servers unpack: nothing is there, and nothing in a home."""
    return tmp_path / "unpacked"


def unpacking_in(place: Path) -> dict[str, str]:
    """Variables for a server: also the places that are looked at after the first are this test's own."""
    (place.parent / "home").mkdir(exist_ok=True)
    return {"VLLM_ENV_UNPACKED": str(place), "XDG_CACHE_HOME": str(place.parent / "cache"), "HOME": str(place.parent / "home")}


def test_two_servers_that_start_at_once_share_one_unpacking(in_parts: Parts, place: Path, no_leftovers: None) -> None:
    """One of them unpacks, no stub but its model's; both answer from the unpacked environment."""
    both = threading.Barrier(2)

    def start(_: int) -> Started:
        with serve(in_parts, as_built=True, environment=unpacking_in(place)) as server:
            said = answer(server)
            told = {text: lines(server, text) for text in (UNPACKING, WAITING, FOUND, STARTING, GIVEN_UP)}
            found = Started(said, told, libraries_of(server, LIBRARY))
            both.wait(600)
            return found

    with ThreadPoolExecutor(2) as pool:
        started = list(pool.map(start, range(2)))
    (tree,) = (p for p in place.iterdir() if p.is_dir())
    for one in started:
        assert one.answer == "The capital of France is Paris, on the river Seine."
        assert one.told[UNPACKING] + one.told[WAITING] + one.told[FOUND] >= one.told[STARTING]
        assert one.libraries == {str(next(tree.rglob(LIBRARY)))}
    given_up = sum(one.told[GIVEN_UP] for one in started)
    assert 1 <= sum(one.told[UNPACKING] for one in started) <= 1 + given_up


def test_a_model_that_imports_vllm_itself_finds_it_and_the_next_start_unpacks_nothing(
    in_parts: Parts, place: Path, no_leftovers: None
) -> None:
    """A user's own model.py knows nothing of parts: its import has them unpacked, and nothing changes in them later."""

    def own(model: Path) -> None:
        code = model / "1/triton_vllm/startup/parts.py"
        code.write_text(re.sub(r"    if importlib.*", "    return\n", code.read_text(), flags=re.DOTALL))

    with serve(in_parts, as_built=True, environment=unpacking_in(place), prepare=own) as server:
        assert answer(server) == "The capital of France is Paris, on the river Seine."
        assert 1 <= lines(server, "vllm_env: unpacking") <= 1 + lines(server, GIVEN_UP)
    (tree,) = (p for p in place.iterdir() if p.is_dir())
    before = {path: path.lstat().st_ino for path in tree.rglob("*.so*")}

    def without_modes(model: Path) -> None:
        """As Triton copies a repository from an object store; it makes the stub executable again."""
        (model / "triton_python_backend_stub").chmod(0o644)

    with serve(in_parts, as_built=True, environment=unpacking_in(place), prepare=without_modes) as server:
        assert answer(server) == "The capital of France is Paris, on the river Seine."
        assert lines(server, UNPACKING) == 0
        assert lines(server, FOUND) >= lines(server, STARTING) >= 1
    assert before
    assert {path: path.lstat().st_ino for path in tree.rglob("*.so*")} == before


def test_an_adopted_model_is_served_by_the_smoke_run_and_then_by_the_user(
    packager: Packager, in_parts: Parts, place: Path, disk_folder: Path, no_leftovers: None
) -> None:
    """Weights in the official folder, named from there. What the smoke run has unpacked also serves afterwards."""
    source = make_official(disk_folder / "theirs" / "opt")
    shutil.rmtree(source / "weights")
    shutil.copytree(in_parts.standin, source / "weights")
    (source / "1" / "model.json").write_text(json.dumps({**CPU_ARGUMENTS, "model": "weights"}))
    (source / "1" / "multi_lora.json").unlink()
    before = snapshot(source)
    repository = disk_folder / "place" / "models"
    root = str(in_parts.binary.parents[1])

    done = packager.run("adopt", str(source), "--triton-root", root, "--model-repository", str(repository), **unpacking_in(place))
    assert f"the smoke run serves {source / 'weights'} with the model's own engine arguments" in done.stderr
    assert "'The capital of France is' -> ' Paris, on the river Seine.'" in done.stdout
    (tree,) = (path for path in place.iterdir() if path.is_dir())

    launch = Launch({**variables_for(CPU_ARGUMENTS), **unpacking_in(place)}, (), READY_SECONDS, STALL_SECONDS)
    note_start(TRITON, engine=in_parts.engine)
    with TritonServer(in_parts.binary, repository, log=disk_folder / "server.log", launch=launch) as server:
        assert generate(server.http_url, PROMPT, model="opt")[1]["text_output"] == "".join(FACTS[2])
        assert libraries_of(server, LIBRARY) == {str(next(tree.rglob(LIBRARY)))}
        assert str(tree / "bin/python3.11") in programs_of(server) or not in_parts.engine
    assert not (repository / "opt" / "weights").exists()
    assert snapshot(source) == before


def test_it_is_served_from_a_path_that_triton_mistakes(in_parts: Parts, place: Path, tmp_path: Path, no_leftovers: None) -> None:
    """A space and a letter beyond ASCII, in the paths of Triton and of the repository."""
    root = in_parts.binary.parents[1]
    if not (root / "libexec").is_dir():
        pytest.skip("this Triton was not provisioned, and is in a place of its own")
    strange = tmp_path / "my caf\N{LATIN SMALL LETTER E WITH ACUTE}"
    (strange / ".triton").mkdir(parents=True)
    for path in root.iterdir():
        if path.name != "bin":
            (strange / ".triton" / path.name).symlink_to(path)
    shutil.copytree(root / "bin", strange / ".triton" / "bin")
    model = shutil.copytree(in_parts.model, strange / "models" / "vllm")
    (model / "vllm_engine_args.json").write_text(json.dumps({"model": str(in_parts.standin), **CPU_ARGUMENTS}))
    variables = {**variables_for(CPU_ARGUMENTS), **unpacking_in(place)}
    launch = Launch(variables, (), READY_SECONDS, STALL_SECONDS)
    with TritonServer(strange / ".triton/bin/tritonserver", strange / "models", log=tmp_path / "log", launch=launch) as server:
        assert answer(server) == "The capital of France is Paris, on the river Seine."
    assert stat.S_IMODE((model / "triton_python_backend_stub").stat().st_mode) == 0o755


_READ_ONLY = """\
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
for library in /lib/*/libpython3.*.so.1.0; do
    [ ! -e "$library" ] || mount --bind /dev/null "$library"
done
export TMPDIR="$2" HOME="$2" XDG_CACHE_HOME="$2"
shift 2
exec setpriv --reuid=12345 --regid=12345 --clear-groups "$@"
"""


@pytest.fixture
def others() -> Iterator[Path]:
    """A folder that another user can reach; pytest's own is closed to others."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root becomes another user")
    with tempfile.TemporaryDirectory(prefix="vllm_env_test_") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_another_user_serves_a_read_only_repository(in_parts: Parts, others: Path, no_leftovers: None) -> None:
    """Where no libpython is installed, as in a container.

    There tritonserver could not try a stub, would want to make it executable, and may not.
    """
    model = shutil.copytree(in_parts.model, others / "models" / "vllm")
    (model / "vllm_engine_args.json").write_text(json.dumps({"model": str(in_parts.standin), **CPU_ARGUMENTS}))
    own = others / "own"
    own.mkdir()
    os.chown(own, 12345, 12345)
    argv = [*with_mounts(), "sh", "-ec", _READ_ONLY, "sh", str(model.parent), str(own), str(in_parts.binary)]
    (others / "tritonserver").write_text(f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n')
    (others / "tritonserver").chmod(0o755)
    variables = {**variables_for(CPU_ARGUMENTS), "VLLM_ENV_UNPACKED": str(own / "unpacked")}
    launch = Launch(variables, (), READY_SECONDS, STALL_SECONDS)
    with TritonServer(others / "tritonserver", model.parent, log=others / "log", launch=launch) as server:
        assert answer(server) == "The capital of France is Paris, on the river Seine."
        assert {process.uids().real for process in server.members()} == {12345}
    assert stat.S_IMODE((model / "triton_python_backend_stub").stat().st_mode) == 0o755


# The folder of the test may be in /tmp, which a folder in memory then covers.
_READ_ONLY_ROOT = """\
folder=$1
mount --bind "$folder" /mnt
mount --bind "$folder/volume" /mnt/volume
mount -o remount,bind,ro /mnt
mount -o remount,bind,ro /
mount -t tmpfs -o exec,mode=1777 tmpfs /tmp
mkdir -p "$folder"
mount --rbind /mnt "$folder"
unset XDG_CACHE_HOME VLLM_ENV_UNPACKED
export TMPDIR=/tmp HOME="$folder/volume"
shift
exec "$@"
"""


def test_it_is_served_on_a_read_only_root_file_system(in_parts: Parts, disk_folder: Path, no_leftovers: None) -> None:
    """As docs/layouts.md says it: /tmp in memory, from which programs may run, and a volume as the home."""
    model = shutil.copytree(in_parts.model, disk_folder / "models" / "vllm")
    (model / "vllm_engine_args.json").write_text(json.dumps({"model": str(in_parts.standin), **CPU_ARGUMENTS}))
    volume = disk_folder / "volume"
    volume.mkdir()
    argv = [*with_mounts(), "sh", "-ec", _READ_ONLY_ROOT, "sh", str(disk_folder), str(in_parts.binary)]
    (disk_folder / "tritonserver").write_text(f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n')
    (disk_folder / "tritonserver").chmod(0o755)
    launch = Launch(variables_for(CPU_ARGUMENTS), (), READY_SECONDS, STALL_SECONDS)
    with TritonServer(disk_folder / "tritonserver", model.parent, log=disk_folder / "log", launch=launch) as server:
        assert answer(server) == "The capital of France is Paris, on the river Seine."
        libraries = libraries_of(server, LIBRARY)
    (tree,) = (path for path in (volume / ".cache/vllm_env/unpacked").iterdir() if path.is_dir())
    assert libraries == {str(next(tree.rglob(LIBRARY)))}


def test_verify_and_inspect_know_parts(repository: Path, tmp_path: Path) -> None:
    """Both accept what was built; a part with one wrong byte is refused by its name."""
    done = run_build("verify", "--model-repository", str(repository))
    assert done.returncode == 0, done.stderr
    shown = json.loads(run_build("inspect", "--json", "--model-repository", str(repository)).stdout)
    assert shown["layout"] == "parts"
    size = sum(part["size"] for part in shown["parts"]) + shown["archive"]["size"]
    assert size == sum(f.stat().st_size for f in (repository / "vllm").glob("vllm_env*/*.gz")) + shown["archive"]["size"]
    copy = tmp_path / "models"
    shutil.copytree(repository, copy, symlinks=True)
    part = copy / "vllm" / shown["parts"][1]["name"]
    with part.open("r+b") as stream:
        stream.seek(1000)
        byte = stream.read(1)
        stream.seek(1000)
        stream.write(bytes([byte[0] ^ 1]))
    done = run_build("verify", "--model-repository", str(copy))
    assert done.returncode == 1
    assert shown["parts"][1]["name"] in done.stderr
