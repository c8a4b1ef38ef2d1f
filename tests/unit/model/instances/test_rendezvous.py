"""How the instances of a load find each other, and that nothing of them stays; locks are the kernel's, folders real."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pytest

from triton_vllm.base import locks
from triton_vllm.base.errors import ConfigError
from triton_vllm.instances import rendezvous
from triton_vllm.instances.rendezvous import Rendezvous, Seat, seat

MODEL = Path(__file__).parents[4] / "model_repository" / "vllm" / "1"
# holds a seat as another instance's process does, until it is killed
HOLDER = """
import sys
sys.path.insert(0, sys.argv[1])
from triton_vllm.instances.rendezvous import Rendezvous, Seat
meeting = Rendezvous.join(Seat(int(sys.argv[2]), 2, "k"))
meeting.lead() and meeting.publish("e1", None)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def home(monkeypatch):
    """A folder for temporary files of a test's own; pytest's has too long a name."""
    with tempfile.TemporaryDirectory(prefix="vllm_env_test_") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def args(name="vllm_0_1", count=2, **changed):
    groups = [{"name": "other", "count": 1}, {"name": "vllm_0", "count": count}]
    return {
        "model_instance_name": name,
        "model_instance_device_id": "0",
        "model_repository": "/models/vllm",
        "model_name": "vllm",
        "model_version": "1",
        "model_config": json.dumps({"instance_group": groups}),
        **changed,
    }


def seat_of(given, server) -> Seat:
    found = seat(given, server)
    assert found
    return found


def held(index):
    """Return the process of another instance that holds a seat."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(MODEL), str(index)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "there\n"
    return process


def killed(process):
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def test_an_instance_knows_its_place_among_those_of_its_group():
    """Groups of a model, GPUs of a group, versions, models and servers each have an engine of their own."""
    own = seat_of(args(), os.getpid())
    assert (own.index, own.count) == (1, 2)
    assert seat_of(args("vllm_0_0"), os.getpid()).key == own.key
    changed = [{"model_version": "2"}, {"model_instance_device_id": "1"}, {"model_repository": "/m"}, {"model_name": "v"}]
    keys = {seat_of(args(**change), os.getpid()).key for change in changed} | {seat_of(args(), os.getppid()).key, own.key}
    assert len(keys) == 6


@pytest.mark.parametrize("alone", [args("vllm_0_0", 1), args("other_0"), args("vllm"), {"model_config": "{}"}])
def test_an_only_instance_needs_no_other(alone):
    """As in every model that asks for one instance; nothing is written for it."""
    assert seat(alone, os.getpid()) is None


def test_an_instance_that_is_added_to_a_loaded_model_is_refused():
    """Triton adds it without a new load, and tells it the old count."""
    with pytest.raises(ConfigError, match="unload the model, then load it again"):
        seat(args("vllm_0_1", 1), os.getpid())


def test_an_unloaded_leader_is_not_replaced_by_one_that_is_about_to_be_unloaded(monkeypatch):
    """Triton ends the instances one after the other; one that is still there long after stays, and leads."""
    first, second = (Rendezvous.join(Seat(index, 2, "k")) for index in range(2))
    first.lead()
    first.publish("e", None)
    first.withdraw("e", closed=True)
    first.leave()
    assert second.closed()
    assert second.address() is None
    assert not second.lead()
    monkeypatch.setattr(rendezvous, "DEPARTURE_S", 0.0)
    assert second.lead()
    assert not second.closed()
    second.leave()


def test_a_first_instance_that_was_killed_is_not_waited_for():
    """It can tell nothing."""
    first = held(0)
    second = Rendezvous.join(Seat(1, 2, "k"))
    assert second.failure() == ""
    killed(first)
    assert "ended while it was loaded" in second.failure()
    second.leave()


def test_what_killed_instances_left_is_removed_by_others(home):
    """A server that was killed with its instances removes nothing."""
    first = held(0)
    (left,) = home.iterdir()
    other = Rendezvous.join(Seat(0, 2, "another"))
    assert left.is_dir()  # while they live
    other.leave()
    killed(first)
    Rendezvous.join(Seat(0, 2, "another")).leave()
    assert list(home.iterdir()) == []


def test_instances_that_start_while_others_leave_find_a_folder(home):
    """The last one to leave removes it, and each that starts removes abandoned ones: perhaps that which was made just now."""

    def come_and_go(index):
        for _ in range(300):
            Rendezvous.join(Seat(index, 4, "key")).leave()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(come_and_go, range(4)))
    assert not list(home.iterdir())


def test_the_folder_is_nobody_elses(home):
    """Who could write there could run code in the engine: vLLM unpickles what it is sent."""
    meeting = Rendezvous.join(Seat(0, 2, "k"))
    (base,) = home.iterdir()
    assert {path.stat().st_mode & 0o077 for path in (base, *base.glob("load-*"))} == {0}
    meeting.leave()
    base.mkdir(mode=0o755)
    base.chmod(0o755)
    with pytest.raises(ConfigError, match="this user's alone"):
        Rendezvous.join(Seat(0, 2, "k"))


def test_a_path_that_no_socket_takes_is_refused_at_load(home, monkeypatch):
    """vLLM would say so after the model has been loaded."""
    long = home / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match="too long a name for sockets"):
        Rendezvous.join(Seat(0, 2, "k"))
    assert list(long.iterdir()) == []


def test_a_path_of_the_documented_length_is_taken(monkeypatch):
    """docs/scaling.md has the number of bytes; a hundred instances need the longest names."""
    (length,) = re.findall(r"at most (\d+) bytes. The last", (MODEL.parents[2] / "docs" / "scaling.md").read_text("utf-8"))
    with tempfile.TemporaryDirectory(prefix="x" * (int(length) - len("/tmp/") - 8), dir="/tmp") as folder:
        assert len(folder) == int(length)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        Rendezvous.join(Seat(99, 100, "k" * 12)).leave()


def test_a_seat_that_another_instance_looks_at_is_taken(home, monkeypatch):
    """To see whether a seat is free, it takes the lock for a moment."""
    load = home / "vllm_env_frontends_k" / "load-abcdef"
    load.mkdir(parents=True, mode=0o700)
    load.parent.chmod(0o700)
    looking = locks.take(load / "seat-0")
    monkeypatch.setattr("uuid.uuid4", lambda: SimpleNamespace(hex="abcdef"))
    done = Timer(0.2, locks.free, (looking,))
    done.start()
    meeting = Rendezvous.join(Seat(0, 2, "k"))
    done.join()
    assert meeting.has_first()
    meeting.leave()
