"""Whose a model's metrics are: locks are the kernel's, and other owners are processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triton_vllm.metrics.claim import Claim, instances

MODEL = Path(__file__).parents[4] / "model_repository" / "vllm" / "1"
# has the claim as another instance's process does, until it is killed or told to give it up
HOLDER = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from triton_vllm.metrics.claim import Claim
claim = Claim(json.loads(sys.argv[2]), int(sys.argv[3]), None, Path(sys.argv[4]))
print(claim.take(), flush=True)
sys.stdin.read()
claim.give_up()
"""
ONE = ({"count": 1},)
TWO = ({"count": 2},)


class Log(list):
    def info(self, text):
        self.append(text)

    warning = error = info


def args(groups=ONE, **changed):
    config = json.dumps({"instance_group": groups})
    return {"model_name": "vllm", "model_version": "1", "model_config": config, **changed}


def held(place, groups=ONE):
    """Return the process of another instance that has the claim."""
    command = [sys.executable, "-c", HOLDER, str(MODEL), json.dumps(args(groups)), str(os.getpid()), str(place)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "True\n"
    return process


def claimed(place, groups=ONE, server=None, **changed):
    return Claim(args(groups, **changed), server or os.getpid(), Log(), place)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize(("theirs", "ours"), [(ONE, ONE), (ONE, TWO), (TWO, ONE)], ids=("1-1", "1-2", "2-1"))
def test_an_owner_waits_for_one_that_takes_its_metrics_away(tmp_path, theirs, ours, killed):
    """Also several for one, and one for several; that it waits is logged once, and at the end no file is left."""
    other = held(tmp_path, theirs)
    log = Log()
    own = Claim(args(ours), os.getpid(), log, tmp_path)
    assert (own.take(), own.take(), len(log)) == (False, False, 1)
    if killed:
        os.kill(other.pid, signal.SIGKILL)
    other.communicate()
    assert (own.take(), own.take()) == (True, True)
    own.give_up()
    assert not list(tmp_path.iterdir())


def test_other_models_versions_and_servers_have_their_own(tmp_path):
    """What a killed server left goes with the next claim."""
    (tmp_path / "vllm_env_0_metrics").touch()
    changes: list[dict[str, Any]] = [{}, {"model_name": "v"}, {"model_version": "2"}, {"server": os.getppid()}]
    claims = [claimed(tmp_path, **change) for change in changes]
    assert all(claim.take() for claim in claims)
    assert len(list(tmp_path.iterdir())) == len(changes)


def test_a_link_in_its_place_is_not_followed(tmp_path):
    """The folder is everybody's."""
    probe = claimed(tmp_path)
    probe.take()
    (path,) = tmp_path.iterdir()
    probe.give_up()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        claimed(tmp_path).take()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("groups", "count"),
    [((), 1), (ONE, 1), (TWO, 2), ((*ONE, *TWO), 3), (({"count": 2, "gpus": [0, 1]},), 4), (({},), 1)],
    ids=str,
)
def test_instances_are_counted_over_groups_and_devices(groups, count):
    """Each of them would publish metrics of the same names and labels."""
    assert instances(args(groups)) == count
