"""The interpreter that waits to become EngineCore, with real processes and multiprocessing's own "spawn"."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import pytest

from support.patience import LIMIT
from triton_vllm.startup import head_start
from triton_vllm.startup.cause import PATH_VARIABLE
from triton_vllm.startup.head_start import HeadStart, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SPAWN = multiprocessing.get_context("spawn")
REPORT = "import os, sys; pipe.send((os.getpid(), dict(os.environ), sorted(sys.modules)))"


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Caches of its own, and the variables as they were afterwards."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "caches"))
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def note(tmp_path: Path) -> Path:
    return tmp_path / "caches/triton_vllm/core-.json"


def noted(tmp_path: Path) -> Any:
    """What the next start of the model goes by, and that of a new one."""
    notes = json.loads(note(tmp_path).read_text())
    own = notes.pop("any")
    assert notes == {hashlib.sha256(b"").hexdigest()[:16]: own}
    return own


def spawned(code: str = REPORT, name: str = "EngineCore") -> tuple[Any, Any]:
    """Start a process as vLLM does; return it, and the pipe that it got."""
    ours, theirs = SPAWN.Pipe()
    # A pipe is a descriptor, which the process must inherit. `exec` needs no module of this test.
    process = SPAWN.Process(target=exec, args=(code, {"pipe": theirs}), name=name)
    process.start()
    theirs.close()
    return process, ours


def answer(pipe: Any) -> Any:
    assert pipe.poll(LIMIT)
    return pipe.recv()


def start(changes: dict[str, str], before: Callable[[HeadStart], object] = lambda _: None) -> tuple[Any, Any, HeadStart]:
    """Do what a load does: a head start, vLLM's changes of the variables, then EngineCore."""
    ahead = HeadStart(os.environ)
    before(ahead)
    os.environ.update(changes)
    with ahead.lent():
        process, pipe = spawned()
    return process, answer(pipe), ahead


def waiting_pid(ahead: HeadStart) -> int:
    assert ahead._waiting is not None
    return ahead._waiting.process.pid


def test_the_first_start_only_takes_notes(tmp_path: Path) -> None:
    """Nothing waits, and the note has what changed: no variable that the load had already, and no passing one."""
    passing = {PATH_VARIABLE: str(tmp_path / "logging.json")}
    (tmp_path / "logging.json").write_text('{"version": 1}')
    waited: list[object] = []
    process, _, ahead = start({"A": f"{sys.prefix}/lib", **passing}, lambda ahead: waited.append(ahead._waiting))
    process.join(LIMIT)
    assert waited == [None]
    ahead.close()
    assert noted(tmp_path) == {"A": "{prefix}/lib"}


def test_the_next_start_uses_the_process_that_waits(tmp_path: Path) -> None:
    """It has vLLM's variables, its descriptors and its exit code, and is a child like any other."""
    first, _, _ = start({"A": "1"})
    first.join(LIMIT)
    del os.environ["A"]
    pids: list[int] = []
    process, (pid, environment, _), ahead = start({"A": "1"}, lambda ahead: pids.append(waiting_pid(ahead)))
    assert [pid, process.pid] == pids * 2
    assert environment == dict(os.environ)
    process.join(LIMIT)
    assert process.exitcode == 0
    assert connection.wait([process.sentinel], LIMIT) == [process.sentinel]
    ahead.close()
    process.close()


def test_what_waits_imports_meanwhile() -> None:
    """Modules that are there; one that is missing or broken does not matter."""
    waiting = Waiting(os.environ, ("colorsys", "no_such_module"))
    ahead = HeadStart(os.environ)
    ahead._waiting = waiting
    with ahead.lent():
        process, pipe = spawned()
    pid, _, modules = answer(pipe)
    assert pid == waiting.process.pid
    assert "colorsys" in modules
    process.join(LIMIT)
    process.close()


@pytest.mark.parametrize("changes", [{"A": "2"}, {"A": "1", "B": "1"}, {}])
def test_other_variables_than_last_time_mean_a_new_process(tmp_path: Path, changes: dict[str, str]) -> None:
    """Some variables count at the start of a process only. The note is corrected, and nothing is left behind."""
    first, _, _ = start({"A": "1"})
    first.join(LIMIT)
    del os.environ["A"]
    pids: list[int] = []
    process, (pid, environment, _), ahead = start(changes, lambda ahead: pids.append(waiting_pid(ahead)))
    assert pid not in pids
    # readline sets LINES and COLUMNS for C programs alone.
    assert environment.items() >= os.environ.items()
    process.join(LIMIT)
    ahead.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert noted(tmp_path) == changes


def test_the_passing_variable_is_followed_late(tmp_path: Path) -> None:
    """vLLM's logging is configured as the variable says, although its import is over."""
    first, _, _ = start({})
    first.join(LIMIT)
    handler = {"class": "logging.FileHandler", "filename": str(tmp_path / "log")}
    config = {"version": 1, "handlers": {"file": handler}, "root": {"handlers": ["file"]}}
    (tmp_path / "logging.json").write_text(json.dumps(config))
    ahead = HeadStart(os.environ)
    pid = waiting_pid(ahead)
    os.environ[PATH_VARIABLE] = str(tmp_path / "logging.json")
    with ahead.lent():
        process, _ = spawned("import logging; logging.error('heard')")
    assert process.pid == pid
    process.join(LIMIT)
    assert (tmp_path / "log").read_text() == "heard\n"


def test_the_operators_own_logging_is_configured_once(tmp_path: Path) -> None:
    """vLLM's import has done so. Once more, and the loggers that were made since would be silent."""
    config = {"version": 1, "disable_existing_loggers": True}
    (tmp_path / "logging.json").write_text(json.dumps(config))
    os.environ[PATH_VARIABLE] = str(tmp_path / "logging.json")
    ahead = HeadStart(os.environ)
    ahead._waiting = Waiting(os.environ, ("concurrent.futures",))
    with ahead.lent():
        process, pipe = spawned("import logging; pipe.send(logging.getLogger('concurrent.futures').disabled)")
    assert answer(pipe) is False
    process.join(LIMIT)


@pytest.mark.parametrize("module", ["colorsys", "logging"])
def test_it_imports_nothing_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """The server's may have a file of any name; `python -c` would look there first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    (tmp_path / f"{module}.py").write_text("raise SystemExit('the wrong module')")
    waiting = Waiting(os.environ, ("colorsys",))
    waiting.socket.close()
    assert waiting.process.wait(LIMIT) == 0


def test_with_data_parallelism_the_coordinator_is_vllms_own() -> None:
    """It comes first, and does not import what EngineCore does."""
    ahead = HeadStart(os.environ)
    ahead._waiting = Waiting(os.environ, ())
    pid = waiting_pid(ahead)
    with ahead.lent():
        processes = [spawned(name=name) for name in ("VLLM_DP_Coordinator", "EngineCore_DP0", "EngineCore_DP1")]
    assert [process.pid == pid for process, _ in processes] == [False, True, False]
    for process, _ in processes:
        process.join(LIMIT)


def test_a_second_process_of_a_load_is_vllms_own(tmp_path: Path) -> None:
    """Only one waits. After the block, multiprocessing is as it was."""
    usual = multiprocessing.context.SpawnProcess._Popen
    first, _, _ = start({})
    first.join(LIMIT)
    ahead = HeadStart(os.environ)
    pid = waiting_pid(ahead)
    with ahead.lent():
        processes = [spawned() for _ in range(2)]
    assert [process.pid == pid for process, _ in processes] == [True, False]
    assert multiprocessing.context.SpawnProcess._Popen is usual
    for process, _ in processes:
        process.join(LIMIT)


def test_one_that_has_died_is_made_up_for() -> None:
    """It was killed, say for its memory: vLLM starts its own."""
    first, _, _ = start({})
    first.join(LIMIT)

    def kill(ahead: HeadStart) -> None:
        os.kill(waiting_pid(ahead), signal.SIGKILL)
        assert ahead._waiting
        ahead._waiting.process.wait(LIMIT)

    process, (pid, _, _), ahead = start({}, kill)
    assert ahead._waiting
    assert pid != ahead._waiting.process.pid
    process.join(LIMIT)
    ahead.close()


def test_one_that_dies_while_it_is_asked_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads the other end: the same."""
    first, _, _ = start({})
    first.join(LIMIT)
    suits = Waiting.suits

    def dies(waiting: Waiting, environment: Any) -> bool:
        fits = suits(waiting, environment)
        waiting.process.kill()
        waiting.process.wait(LIMIT)
        return fits

    monkeypatch.setattr(Waiting, "suits", dies)
    process, (pid, _, _), ahead = start({})
    assert ahead._waiting
    assert pid != ahead._waiting.process.pid
    process.join(LIMIT)
    ahead.close()


def test_a_killed_process_is_noticed_by_its_sentinel_and_its_signal() -> None:
    """As vLLM notices the death of EngineCore."""
    first, _, _ = start({})
    first.join(LIMIT)
    ahead = HeadStart(os.environ)
    with ahead.lent():
        process, pipe = spawned("pipe.recv()")
    assert process.is_alive()
    process.kill()
    assert connection.wait([process.sentinel], LIMIT) == [process.sentinel]
    process.join(LIMIT)
    assert process.exitcode == -signal.SIGKILL
    pipe.close()


def test_one_that_is_not_needed_ends_with_the_load() -> None:
    """vLLM has forked EngineCore, or the load has failed."""
    first, _, _ = start({})
    first.join(LIMIT)
    ahead = HeadStart(os.environ)
    pid = waiting_pid(ahead)
    ahead.close()
    ahead.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_it_ends_with_this_process(tmp_path: Path) -> None:
    """The other end is closed by the kernel."""
    waiting = Waiting(os.environ, ())
    waiting.socket.close()
    assert waiting.process.wait(LIMIT) == 0


def test_ctrl_c_does_not_end_it() -> None:
    """It reaches all processes of a terminal, and the server decides when its processes end."""
    waiting = Waiting(os.environ, ())
    ahead = HeadStart(os.environ)
    ahead._waiting = waiting
    with ahead.lent():
        # The answer shows that it has ignored the signal: it was sent before the process was needed.
        process, pipe = spawned("import signal; pipe.send(signal.getsignal(signal.SIGINT) is signal.default_int_handler)")
    assert answer(pipe) is True
    process.join(LIMIT)


def test_each_model_has_its_own_variables(tmp_path: Path) -> None:
    """Two models in one server would otherwise disturb each other at each start. A new one goes by the last."""
    for name in ("a", "b", "a", "c"):
        before = HeadStart(os.environ, name)
        assert (before._waiting is None) == (not note(tmp_path).exists())
        fits = before._waiting and before._waiting._environment.get("NAME") == name
        os.environ["NAME"] = name
        with before.lent():
            process, pipe = spawned()
        answer(pipe)
        process.join(LIMIT)
        before.close()
        del os.environ["NAME"]
    assert fits is False  # "c" is new and got the variables of "a"
    for name in ("a", "b", "c"):
        ahead = HeadStart(os.environ, name)
        assert ahead._waiting
        assert ahead._waiting._environment["NAME"] == name
        ahead.close()


def test_the_notes_do_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes; the last model's stays."""
    monkeypatch.setattr(head_start, "_MOST_NOTES", 2)
    for name in "abcde":
        HeadStart(os.environ, name)._remember()
    notes = list(json.loads(note(tmp_path).read_text()))
    assert len(notes) <= 4
    assert notes[-1] == hashlib.sha256(b"e").hexdigest()[:16]


DAMAGED = ["", "[]", "{", "{}", '{"any": 1}', '{"any": {"A": 1}}', '{"any": {"LD_PRELOAD": "/no/such/library.so"}}']


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_note_is_no_note(tmp_path: Path, text: str) -> None:
    """Nor is one about a library that has gone, which the loader would report in the server's log."""
    first, _, _ = start({})
    first.join(LIMIT)
    note(tmp_path).write_text(text)
    assert HeadStart(os.environ)._waiting is None
    process, _, _ = start({"B": "1"})
    process.join(LIMIT)
    assert json.loads(note(tmp_path).read_text())["any"] == {"B": "1"}


def test_a_place_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    """The process is vLLM's own, at each start."""
    (tmp_path / "caches").write_text("a file")
    for _ in range(2):
        process, _, ahead = start({})
        assert ahead._waiting is None
        process.join(LIMIT)


def test_a_fork_does_not_take_it() -> None:
    """It is not the parent of the process that waits."""
    waiting = Waiting(os.environ, ())
    child = os.fork()
    if child == 0:
        os._exit(waiting.suits(os.environ))
    assert os.waitpid(child, 0)[1] == 0
    assert waiting.suits(os.environ)
    waiting.end()


def test_a_replaced_program_is_started_as_vllm_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM does it to bind a process to a NUMA node."""
    waiting = Waiting(os.environ, ())
    monkeypatch.setattr("multiprocessing.spawn.get_executable", lambda: "/usr/bin/numa-wrapper")
    assert not waiting.suits(os.environ)
    waiting.end()


def test_modules_for_a_cpu_are_not_tried_beside_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's build for a GPU never imports them."""
    monkeypatch.setattr(head_start, "_GPUS", (str(tmp_path / "nvidiactl"),))
    assert "vllm.v1.worker.cpu_worker" in head_start.modules()
    (tmp_path / "nvidiactl").touch()
    assert head_start.modules() == head_start.MODULES
