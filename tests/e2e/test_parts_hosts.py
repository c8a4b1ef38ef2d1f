"""An environment in parts on the stock tritonserver, where a host is not as one would like: a kill, a full disk, two models."""

from __future__ import annotations

import contextlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from support.leases import held_back
from support.leftovers import name_of
from support.mapped import libraries_of
from support.model_control import GIVEN_UP
from support.parts_fixtures import (
    ANSWER,
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
from support.patience import wait_for
from support.serving import in_small_place, serve

if TYPE_CHECKING:
    from support.serving import Parts
    from vllm_env.serve.server import TritonServer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif("VLLM_ENV_TEST_ENVIRONMENT" in os.environ, reason="serves an environment that was not built"),
]
STUB = "triton_python_b"


def test_two_models_of_one_environment_share_one_unpacking(in_parts: Parts, place: Path, no_leftovers: None) -> None:
    """Each has an archive and parts of its own, and the server loads both at once."""

    def with_another(model: Path) -> None:
        other = shutil.copytree(in_parts.model, model.parent / "other")
        shutil.copy(model / "vllm_engine_args.json", other)

    with serve(in_parts, as_built=True, environment=unpacking_in(place), prepare=with_another) as server:
        assert [answer(server, model) for model in ("vllm", "other")] == [ANSWER] * 2
        (tree,) = trees_in(place)
        library = str(next(tree.rglob(LIBRARY)))
        assert libraries_of(server, LIBRARY) == {library}
        stubs = [one for one in server.members() if name_of(one).startswith(STUB)]
        assert len(stubs) == 2
        assert all(library in Path(f"/proc/{stub.pid}/maps").read_text() for stub in stubs)
        assert 1 <= lines(server, UNPACKING) <= 1 + lines(server, GIVEN_UP)


def worker_with(server: TritonServer, part: Path) -> psutil.Process | None:
    """Return the process that unpacks a part."""
    for process in server.members():
        with contextlib.suppress(psutil.Error):
            if str(part) in process.cmdline():
                return process
    return None


def unpacking(server: TritonServer, part: Path) -> psutil.Process:
    """Start a server, and again if it gives its load up; return the process that unpacks a part, stopped in its midst."""
    for _ in range(2):
        with held_back(part):
            server.start()
            worker = wait_for(lambda: worker_with(server, part) or not server.running, "a process that unpacks the part")
            if isinstance(worker, psutil.Process):
                worker.suspend()
                return worker
        server.stop()
    pytest.fail(f"{server.log} has no unpacking")


def test_what_a_killed_server_was_unpacking_is_unpacked_again(
    in_parts: Parts, place: Path, tmp_path: Path, no_leftovers: None
) -> None:
    """SIGKILL for the server and its stub. A process that unpacks lives on, so the next server waits until that has ended."""
    models = tmp_path / "models"
    model = copy_into(models, in_parts)
    part = max((model / "vllm_env.parts").iterdir(), key=lambda file: file.stat().st_size)
    log = tmp_path / "second.log"
    killed = server_of(in_parts, models, unpacking_in(place), tmp_path / "first.log")
    with contextlib.ExitStack() as stack:
        stack.callback(killed.stop)
        worker = unpacking(killed, part)
        for process in killed.members():
            if name_of(process).startswith(("tritonserver", STUB)):
                process.kill()
        wait_for(lambda: killed.members() == [worker], lambda: f"the end of all but {worker.pid} of {killed.members()}")
        (unfinished,) = trees_in(place)

        def let_go() -> str:
            """Return what the next server does first, and let the process that unpacks go on."""
            told = wait_for(lambda: [text for text in (WAITING, UNPACKING) if log.exists() and text in log.read_text("utf-8")])
            worker.resume()
            return told[0]

        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(let_go)
            with server_of(in_parts, models, unpacking_in(place), log) as server:
                assert answer(server) == ANSWER
                (tree,) = trees_in(place)
                assert libraries_of(server, LIBRARY) == {str(next(tree.rglob(LIBRARY)))}
        assert told.result() == WAITING
        assert unfinished.name.startswith(f"{tree.name}.")
        assert killed.members() == []


@pytest.mark.parametrize(
    ("size", "reason"),
    [("3m", "0.0 GB are free"), ("8g,nr_inodes=200", "No space left on device")],
    ids=["before", "in the midst"],
)
def test_a_full_disk_is_passed_over(
    in_parts: Parts, place: Path, tmp_path: Path, no_leftovers: None, size: str, reason: str
) -> None:
    """The next place takes the environment, and the full disk keeps nothing. The second disk has room, but for 200 files."""
    place.mkdir()
    variables = unpacking_in(place)
    small = in_small_place(in_parts, str(place), tmp_path, f"{size},mode=0700")
    with serve(small, as_built=True, environment=variables) as server:
        assert answer(server) == ANSWER
        assert lines(server, f"cannot unpack in {place}: {reason}") >= 1
        (tree,) = trees_in(Path(variables["XDG_CACHE_HOME"], "vllm_env/unpacked"))
        assert libraries_of(server, LIBRARY) == {str(next(tree.rglob(LIBRARY)))}
        # Only the server's processes have the small disk mounted.
        left = Path(f"/proc/{server.pid}/root{place}").iterdir()
        assert [path.name for path in left] == [f"{tree.name}.lock"]
