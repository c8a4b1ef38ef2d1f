"""What instances of one engine refuse, publish and give up."""

from __future__ import annotations

import asyncio
import importlib
import struct
import tempfile
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from support.engine_parts import Log
from support.patience import LIMIT
from triton_vllm import vllm_api
from triton_vllm.base.errors import ConfigError
from triton_vllm.base.limits import Limits
from triton_vllm.base.refusals import Refusals
from triton_vllm.instances import frontends
from triton_vllm.instances.frontends import Frontends
from triton_vllm.instances.rendezvous import Rendezvous, Seat
from triton_vllm.instances.source import Loss
from triton_vllm.startup import load
from triton_vllm.startup.settings import Settings

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


@pytest.mark.parametrize("address", ["ipc:///tmp/x", "tcp://10.0.0.1:0"])
def test_the_engine_is_told_of_all_front_ends_if_it_is_here(address, monkeypatch):
    """Where a rank is on another machine no socket of this one's file system reaches it."""
    addresses = SimpleNamespace(inputs=[address], outputs=[address], frontend_stats_publish_address="ipc://s")

    @contextmanager
    def launch(config, executor, log_stats, addresses):
        yield SimpleNamespace(addresses=addresses)

    module = SimpleNamespace(launch_core_engines=launch)

    def from_vllm_config(config, **given):
        with module.launch_core_engines(config, "executor", True, addresses):
            return SimpleNamespace(**given)

    args = SimpleNamespace(create_engine_config=lambda usage: "config", disable_log_stats=True)
    vllm: Any = SimpleNamespace(
        AsyncEngineArgs=lambda **values: args,
        AsyncLLM=SimpleNamespace(from_vllm_config=from_vllm_config),
        UsageContext=SimpleNamespace(API_SERVER=1),
        disable_envs_cache=None,
        enable_envs_cache=None,
    )
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    others = [("ipc://a-in", "ipc://a-out"), ("ipc://b-in", "ipc://b-out")]
    if address.startswith("tcp"):
        with pytest.raises(ConfigError, match="needs all ranks of the engine on this machine"):
            vllm_api.launch(vllm, {}, others)
    else:
        llm: Any
        llm, statistics = vllm_api.launch(vllm, {}, others)
        assert (llm.client_count, llm.client_index, llm.client_addresses, statistics) == (3, 0, None, "ipc://s")
        assert (args._api_process_count, args._api_process_rank) == (3, 0)
        assert addresses.inputs == [address, "ipc://a-in", "ipc://b-in"]
        assert addresses.outputs == [address, "ipc://a-out", "ipc://b-out"]
    assert module.launch_core_engines is launch


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


def test_operator_requests_are_refused_where_several_engines_serve(monkeypatch):
    """Before an engine is started; instances that share one get as far as that."""
    settings = Settings(limits=Limits(operator_requests=("sleep",)))
    monkeypatch.setattr(load, "prepare", lambda *_: SimpleNamespace(settings=settings))
    monkeypatch.setattr(load, "_start_engine", lambda *_: pytest.fail("it starts"))
    pair: Any = SimpleNamespace(count=2)
    for groups in ('[{"count": 2}, {"count": 1}]', '[{"count": 2, "gpus": [0, 1]}]'):
        with pytest.raises(ConfigError, match="OPERATOR_REQUESTS is for a model with one engine"):
            load._load({"model_config": f'{{"instance_group": {groups}}}'}, Log(), pair)
    for config, shared in (("{}", None), ('{"instance_group": [{"count": 2}]}', pair)):
        with pytest.raises(pytest.fail.Exception, match="it starts"):
            load._load({"model_config": config}, Log(), shared)


def test_metrics_need_vllms_statistics():
    """REPORT_CUSTOM_METRICS publishes nothing where the engine arguments have `disable_log_stats`."""
    prepared: Any = SimpleNamespace(settings=Settings(metrics=True), engine_args={"disable_log_stats": True})
    assert load._publish(prepared, None, {}, Log(), Refusals()) is None
