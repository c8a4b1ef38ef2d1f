"""An environment in parts on the stock tritonserver: unpacked once on a machine, whole or not at all, and served from there."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.bucket import from_bucket
from support.mapped import libraries_of, programs_of
from support.model_control import GIVEN_UP
from support.official_folder import make_official, snapshot
from support.parts_fixtures import (
    ANSWER,
    FOUND,
    LIBRARY,
    UNPACKING,
    WAITING,
    answer,
    copy_into,
    lines,
    server_of,
    trees_in,
    unpacking_in,
)
from support.repositories import run_build
from support.serving import CPU_ARGUMENTS, behind, serve

if TYPE_CHECKING:
    from support.parts_fixtures import Packager
    from support.serving import Parts

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif("VLLM_ENV_TEST_ENVIRONMENT" in os.environ, reason="serves an environment that was not built"),
]
STARTING = "[vllm] importing vLLM"  # once, but for a start that gets stuck by a fault of the Python backend and is tried again


@dataclass(frozen=True)
class Started:
    """What one of several servers did: its answer, how often its log has a text, and what its processes have loaded."""

    answer: str
    told: dict[str, int]
    libraries: set[str]


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
    (tree,) = trees_in(place)
    for one in started:
        assert one.answer == ANSWER
        assert one.told[UNPACKING] + one.told[WAITING] + one.told[FOUND] >= one.told[STARTING]
        assert one.libraries == {str(next(tree.rglob(LIBRARY)))}
    given_up = sum(one.told[GIVEN_UP] for one in started)
    assert 1 <= sum(one.told[UNPACKING] for one in started) <= 1 + given_up


@pytest.mark.slow
def test_a_model_that_imports_vllm_itself_finds_it_and_the_next_start_unpacks_nothing(
    in_parts: Parts, place: Path, no_leftovers: None
) -> None:
    """A user's own model.py knows nothing of parts: its import has them unpacked, and nothing changes in them later."""

    def own(model: Path) -> None:
        code = model / "1/triton_vllm/startup/parts.py"
        code.write_text(re.sub(r"    if importlib.*", "    return\n", code.read_text(), flags=re.DOTALL))

    with serve(in_parts, as_built=True, environment=unpacking_in(place), prepare=own) as server:
        assert answer(server) == ANSWER
        assert 1 <= lines(server, "vllm_env: unpacking") <= 1 + lines(server, GIVEN_UP)
    (tree,) = trees_in(place)
    before = {path: path.lstat().st_ino for path in tree.rglob("*.so*")}

    with serve(in_parts, as_built=True, environment=unpacking_in(place)) as server:
        assert answer(server) == ANSWER
        assert lines(server, UNPACKING) == 0
        assert lines(server, FOUND) >= lines(server, STARTING) >= 1
    assert before
    assert {path: path.lstat().st_ino for path in tree.rglob("*.so*")} == before


@pytest.mark.slow
def test_parts_from_an_object_store_are_served(in_parts: Parts, disk_folder: Path, no_leftovers: None) -> None:
    """Triton makes the stub executable again; the parts have modes and links in them."""
    model = copy_into(disk_folder / "models", in_parts)
    with from_bucket(in_parts, model.parent) as stored, stored as server:
        assert answer(server) == ANSWER


@pytest.mark.slow
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
    (tree,) = trees_in(place)

    with server_of(in_parts, repository, unpacking_in(place), disk_folder / "server.log") as server:
        assert answer(server, "opt") == ANSWER
        assert libraries_of(server, LIBRARY) == {str(next(tree.rglob(LIBRARY)))}
        assert str(tree / "bin/python3.11") in programs_of(server) or not in_parts.engine
    assert not (repository / "opt" / "weights").exists()
    assert snapshot(source) == before


@pytest.mark.slow
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
    model = copy_into(strange / "models", in_parts)
    parts = dataclasses.replace(in_parts, binary=strange / ".triton/bin/tritonserver")
    with server_of(parts, strange / "models", unpacking_in(place), tmp_path / "log") as server:
        assert answer(server) == ANSWER
    assert stat.S_IMODE((model / "triton_python_backend_stub").stat().st_mode) == 0o755


_READ_ONLY = """\
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
for library in /lib/*/libpython3.*.so.1.0; do
    [ ! -e "$library" ] || mount --bind /dev/null "$library"
done
export TMPDIR="$2" HOME="$2" XDG_CACHE_HOME="$2"
user=$3
shift 3
exec setpriv --reuid="$user" --regid="$user" --clear-groups "$@"
"""


@pytest.mark.parametrize("user", [pytest.param(1000, marks=pytest.mark.slow), 12345])
def test_another_user_serves_a_read_only_repository(in_parts: Parts, others: Path, no_leftovers: None, user: int) -> None:
    """Where no libpython is installed, as in a container.

    There tritonserver could not try a stub, would want to make it executable, and may not. The first number is that of Triton's
    own user in its containers; nobody has the other.
    """
    model = copy_into(others / "models", in_parts)
    own = others / "own"
    own.mkdir()
    os.chown(own, user, user)
    parts = behind(in_parts, others, _READ_ONLY, model.parent, own, user)
    with server_of(parts, model.parent, {"VLLM_ENV_UNPACKED": str(own / "unpacked")}, others / "log") as server:
        assert answer(server) == ANSWER
        assert {process.uids().real for process in server.members()} == {user}
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


@pytest.mark.slow
def test_it_is_served_on_a_read_only_root_file_system(in_parts: Parts, disk_folder: Path, no_leftovers: None) -> None:
    """As docs/layouts.md says it: /tmp in memory, from which programs may run, and a volume as the home."""
    model = copy_into(disk_folder / "models", in_parts)
    volume = disk_folder / "volume"
    volume.mkdir()
    parts = behind(in_parts, disk_folder, _READ_ONLY_ROOT, disk_folder)
    with server_of(parts, model.parent, {}, disk_folder / "log") as server:
        assert answer(server) == ANSWER
        libraries = libraries_of(server, LIBRARY)
    (tree,) = trees_in(volume / ".cache/vllm_env/unpacked")
    assert libraries == {str(next(tree.rglob(LIBRARY)))}


def test_verify_and_inspect_know_parts(parts_repository: Path, tmp_path: Path) -> None:
    """Both accept what was built; a part with one wrong byte is refused by its name."""
    done = run_build("verify", "--model-repository", str(parts_repository))
    assert done.returncode == 0, done.stderr
    shown = json.loads(run_build("inspect", "--json", "--model-repository", str(parts_repository)).stdout)
    assert shown["layout"] == "parts"
    size = sum(part["size"] for part in shown["parts"]) + shown["archive"]["size"]
    assert size == sum(f.stat().st_size for f in (parts_repository / "vllm").glob("vllm_env*/*.gz")) + shown["archive"]["size"]
    copy = tmp_path / "models"
    shutil.copytree(parts_repository, copy, symlinks=True)
    part = copy / "vllm" / shown["parts"][1]["name"]
    with part.open("r+b") as stream:
        stream.seek(1000)
        byte = stream.read(1)
        stream.seek(1000)
        stream.write(bytes([byte[0] ^ 1]))
    done = run_build("verify", "--model-repository", str(copy))
    assert done.returncode == 1
    assert shown["parts"][1]["name"] in done.stderr
