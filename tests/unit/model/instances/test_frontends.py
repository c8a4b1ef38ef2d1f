"""What instances of one engine refuse, publish and give up."""

from __future__ import annotations

import asyncio
import importlib
import struct
import tempfile
from types import SimpleNamespace
from typing import Any, cast

import pytest

from support.engine_parts import Log
from support.patience import LIMIT
from triton_vllm import vllm_api
from triton_vllm.base.errors import ConfigError
from triton_vllm.instances import frontends
from triton_vllm.instances.frontends import Frontends
from triton_vllm.instances.rendezvous import Rendezvous, Seat
from triton_vllm.instances.source import Loss

ADDRESSES = ["client_addresses", "client_count", "client_index"]


@pytest.fixture
def made(monkeypatch):
    """Instances of one load, whose vLLM starts nothing (`tests/e2e/test_model_instances.py` has the real one)."""
    monkeypatch.setattr(vllm_api, "launch", lambda *_: (SimpleNamespace(), None))
    monkeypatch.setattr(vllm_api, "connect", lambda *_: SimpleNamespace())
    monkeypatch.setattr(vllm_api, "lacking", lambda vllm: "")
    monkeypatch.setattr(frontends, "LOOK_PERIOD_S", 0.001)
    with tempfile.TemporaryDirectory(prefix="vllm_env_test_") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        instances = [Frontends(own, Rendezvous.join(own), Log()) for own in (Seat(index, 2, "k") for index in range(2))]
        for one in instances:
            one.use(cast("Any", SimpleNamespace(version="1")), {}, 1)
        yield instances


def test_an_engine_that_hangs_for_one_is_given_up_by_all(made):
    """The one that has requests open finds out; the one that leads may have none."""
    first, second = made

    async def start():
        await first.start()
        first.share()
        await asyncio.wait_for(second.start(), LIMIT)

    asyncio.run(start())
    second.retire(hung=True)
    assert first.loss() == Loss("does not answer another instance")
    first.retire(hung=True)
    asyncio.run(start())
    assert first.loss() is None


def test_an_instance_without_a_first_one_does_not_wait_for_ever(made, monkeypatch):
    """Triton may add an instance that finds no load to join."""
    monkeypatch.setattr(frontends, "FIRST_INSTANCE_S", 0.0)
    own = Seat(1, 2, "another")
    alone = Frontends(own, Rendezvous.join(own), Log())
    alone.use(cast("Any", SimpleNamespace(version="1")), {}, 1)
    with pytest.raises(ConfigError, match="the first instance of the model is not being loaded"):
        asyncio.run(alone.start())


def test_none_goes_on_if_one_is_forsaken(made):
    """Also the one that leads. Otherwise the server would look healthy with the rest, and part of its requests would fail."""
    made[1].forsake("the reason")
    assert [one.loss() for one in made] == [Loss("the reason", for_good=True)] * 2


def test_gauges_are_published_by_the_one_that_knows_them_best(made):
    """vLLM gives a rank's figures of each step to one front end: the other's are of an earlier step. Counters are each one's."""
    first, second = made
    for one in made:
        one.use(SimpleNamespace(version="1"), {}, 2)
    samples = [SimpleNamespace(labels={"engine": rank}) for rank in "01"]
    families = [SimpleNamespace(name="n", type=kind, samples=samples) for kind in ("gauge", "counter", "histogram")]
    struct.pack_into("4d", first._figures, 0, 1.0, 2.0, 4.0, 3.0)
    assert [family.samples for family in first.latest(families)] == [samples[1:], samples, samples]
    assert [family.samples for family in second.latest(families)] == [samples[:1], samples, samples]
    assert [family.samples for family in families] == [samples] * 3


def launcher(config, executor, log_stats, addresses):
    """vLLM's launch_core_engines."""


def old_launcher(config, executor, log_stats):
    """That of a vLLM before it took addresses."""


def a_vllm(parameters, **fields):
    source = f"def from_vllm_config(config, {', '.join(parameters)}): pass"
    found: dict[str, Any] = {}
    exec(source, found)
    return SimpleNamespace(AsyncLLM=SimpleNamespace(**found), AsyncEngineArgs=SimpleNamespace(**fields), version="0.11.0")


FIELDS = {"_api_process_count": 1, "_api_process_rank": 0}


@pytest.mark.parametrize(
    ("vllm", "launch", "lacks"),
    [
        (a_vllm(ADDRESSES, **FIELDS), launcher, ""),
        (a_vllm(ADDRESSES[:1], **FIELDS), launcher, "client_count, client_index"),
        (a_vllm(ADDRESSES, **FIELDS), old_launcher, "launch_core_engines(addresses)"),
        (a_vllm(ADDRESSES), launcher, "_api_process_count, _api_process_rank"),
    ],
)
def test_a_vllm_that_cannot_is_refused_by_what_it_lacks(vllm, launch, lacks, monkeypatch):
    """And not by its number; the text says what to do."""
    module = SimpleNamespace(launch_core_engines=launch, VLLM_ENGINE_READY_TIMEOUT_S=600)
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    assert vllm_api.lacking(vllm) == lacks
    own = Seat(0, 2, "refused")
    instance = Frontends(own, Rendezvous.join(own), Log())
    try:
        if lacks:
            with pytest.raises(ConfigError, match=r"count is 2, but vLLM 0.11.0 cannot .*use count: 1"):
                instance.use(vllm, {}, 1)
        else:
            instance.use(vllm, {}, 1)
    finally:
        instance.leave()


def test_a_vllm_that_starts_its_engine_in_another_way_is_refused_at_once(monkeypatch):
    """The engine would not know the other instances, and each of them would wait a minute for it."""
    ended: list[bool] = []
    args = SimpleNamespace(create_engine_config=lambda usage: "config", disable_log_stats=True)
    made = SimpleNamespace(shutdown=lambda: ended.append(True))
    vllm: Any = SimpleNamespace(
        AsyncEngineArgs=lambda **values: args,
        AsyncLLM=SimpleNamespace(from_vllm_config=lambda config, **given: made),
        UsageContext=SimpleNamespace(API_SERVER=1),
        disable_envs_cache=None,
        enable_envs_cache=None,
    )
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(launch_core_engines=launcher))
    with pytest.raises(ConfigError, match=r"without launch_core_engines; use count: 1"):
        vllm_api.launch(vllm, {}, [("ipc://a-in", "ipc://a-out")])
    assert ended == [True]
