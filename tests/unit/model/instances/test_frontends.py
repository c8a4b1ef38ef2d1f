"""An instance's part in an engine that several share: who starts it, who connects, and who notices its end."""

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
from triton_vllm.instances import frontends
from triton_vllm.instances.frontends import Frontends
from triton_vllm.instances.rendezvous import Rendezvous, Seat
from triton_vllm.instances.source import Loss
from triton_vllm.startup import load
from triton_vllm.startup.settings import Settings

ADDRESSES = ["client_addresses", "client_count", "client_index"]


@pytest.fixture
def made(monkeypatch):
    """Instances of one load; vLLM's clients are what they were started with."""
    started: list[tuple[Any, ...]] = []

    def launch(vllm, values, others):
        started.append(("launch", others))
        return SimpleNamespace(others=others), "ipc://stats"

    def connect(vllm, values, place, index, count):
        started.append(("connect", place, index, count))
        return SimpleNamespace(place=place)

    monkeypatch.setattr(vllm_api, "launch", launch)
    monkeypatch.setattr(vllm_api, "connect", connect)
    monkeypatch.setattr(vllm_api, "lacking", lambda vllm: "")
    monkeypatch.setattr(frontends, "PERIOD_S", 0.001)
    with tempfile.TemporaryDirectory(prefix="vllm_env_test_") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        instances = [Frontends(own, Rendezvous.join(own), Log()) for own in (Seat(index, 2, "k") for index in range(2))]
        for one in instances:
            one.use(cast("Any", SimpleNamespace(version="1")), {}, 1)
        yield SimpleNamespace(instances=instances, started=started)


def started_both(made):
    """Start both as Triton does, at the same time and the later first."""

    async def start():
        second = asyncio.ensure_future(made.instances[1].start())
        await asyncio.sleep(0.02)
        first = await made.instances[0].start()
        await asyncio.sleep(0.02)
        assert not second.done()  # it connects to an engine that serves
        made.instances[0].share()
        return first, await asyncio.wait_for(second, LIMIT)

    return asyncio.run(start())


def test_one_starts_the_engine_and_the_other_connects_to_it(made):
    """With the very addresses that the engine was told."""
    first, second = started_both(made)
    ((asked, answered),) = first.others
    assert second.place == {"input_address": asked, "output_address": answered, "stats_update_address": "ipc://stats"}
    assert made.started[1][2:] == (1, 2)
    assert [one.leads for one in made.instances] == [True, False]
    assert [one.loss() for one in made.instances] == [None, None]


def test_the_end_of_the_engine_is_noticed_by_the_other_which_gets_the_next(made):
    """Its own client would never know: vLLM watches the process in the one that started it."""
    started_both(made)
    first, second = made.instances
    first.retire(hung=False)
    assert second.loss() == Loss("has died")
    started_both(made)
    assert [kind[0] for kind in made.started] == ["launch", "connect"] * 2
    assert made.started[1][1] != made.started[3][1]
    assert second.loss() is None


def test_an_engine_that_hangs_for_one_is_given_up_by_all(made):
    """The one that has requests open finds out; the one that leads may have none."""
    started_both(made)
    first, second = made.instances
    second.retire(hung=True)
    assert first.loss() == Loss("does not answer another instance")
    started_both(made)
    assert first.loss() is None


def test_the_requests_of_an_instance_that_has_ended_do_not_count(made):
    """Nor does its sleep that waited. Nobody else would take them back."""
    started_both(made)
    first, second = made.instances
    second.counts.note(7)
    with second.sleep_state.waiting():
        assert first.loss() is None
        assert (first.counts.others(), first.sleep_state.asleep) == (7, True)
        second.leave()
        assert first.loss() is None
        assert (first.counts.others(), first.sleep_state.asleep) == (0, False)


def test_only_the_instance_that_has_started_the_engine_knows_it_is_awake(made):
    """One that connects late may find an engine that an operator has put to sleep. A new engine is awake."""
    started_both(made)
    first, second = made.instances
    second.sleep_state.note_change(asleep=True)
    second.share()
    assert first.sleep_state.asleep
    first.share()
    assert (second.sleep_state.asleep, first.sleep_state.is_latest) == (False, True)


def test_one_instance_at_a_time_has_the_operators_turn(made):
    """Each knows the file of the others."""
    first, second = made.instances
    turn = first.sleep_state.take_turn()
    with pytest.raises(BlockingIOError):
        second.sleep_state.take_turn()
    first.sleep_state.end_turn(turn)
    second.sleep_state.end_turn(second.sleep_state.take_turn())


def test_an_unloaded_leader_is_no_death(made):
    """At each unloading one of them is the first to go."""
    started_both(made)
    first, second = made.instances
    first.close()
    assert second.loss().in_order
    second.close()
    first.leave()
    assert second.loss().in_order


def test_the_other_leads_when_the_leader_is_gone(made):
    """Its locks go with it."""
    started_both(made)
    first, second = made.instances
    first._meeting.leave()
    assert second.loss() == Loss("has died with the instance that had started it")
    asyncio.run(second.start())
    assert made.started[-1][0] == "launch"
    assert second.leads


def test_a_failed_load_has_one_reason(made):
    """Triton shows one instance's."""
    first, second = made.instances
    first.leave("vLLM did not start: no memory")
    with pytest.raises(ConfigError, match="vLLM did not start: no memory"):
        asyncio.run(second.start())


def test_a_load_that_fails_after_the_engine_has_started_is_not_taken_over(made):
    """Triton is about to end all of them; a second engine would be started for nothing."""
    started_both(made)
    first, second = made.instances
    first.leave("no thread could be started")
    assert second.loss().in_order
    assert not second.leads


def test_an_instance_without_a_first_one_does_not_wait_for_ever(made, monkeypatch):
    """Triton may add an instance that finds no load to join."""
    monkeypatch.setattr(frontends, "FIRST_S", 0.0)
    own = Seat(1, 2, "another")
    alone = Frontends(own, Rendezvous.join(own), Log())
    alone.use(cast("Any", SimpleNamespace(version="1")), {}, 1)
    with pytest.raises(ConfigError, match="the first instance of the model is not being loaded"):
        asyncio.run(alone.start())


def test_gauges_are_published_by_the_one_that_knows_them_best(made):
    """vLLM gives a rank's figures of each step to one front end: the other's are of an earlier step. Counters are each one's."""
    first, second = made.instances
    for one in made.instances:
        one.use(SimpleNamespace(version="1"), {}, 2)
    samples = [SimpleNamespace(labels={"engine": rank}) for rank in "01"]
    families = [SimpleNamespace(name="n", type=kind, samples=samples) for kind in ("gauge", "counter", "histogram")]
    struct.pack_into("4d", first._figures, 0, 1.0, 2.0, 4.0, 3.0)
    assert [family.samples for family in first.latest(families)] == [samples[1:], samples, samples]
    assert [family.samples for family in second.latest(families)] == [samples[:1], samples, samples]
    assert [family.samples for family in families] == [samples] * 3


def test_the_engines_sleep_is_published_by_the_one_that_has_changed_it(made):
    """vLLM tells no other front end, whoever has the figures of the last step."""
    first, second = made.instances
    family = SimpleNamespace(name="vllm:engine_sleep_state", type="gauge", samples=[SimpleNamespace(labels={"engine": "0"})])
    struct.pack_into("2d", first._figures, 0, 2.0, 1.0)
    second.sleep_state.note_change(asleep=True)
    assert (first.latest([family]), second.latest([family])) == ([], [family])
    first.sleep_state.note_change(asleep=False)
    assert (first.latest([family]), second.latest([family])) == ([family], [])


def a_front_end_of_vllm(steps):
    """A client that takes the engine's outputs as vLLM's does, and what it has recorded."""

    async def get_output_async():
        return next(steps)

    recorded = []
    manager = SimpleNamespace(record=lambda *args, **kwargs: recorded.append((args, kwargs)))
    return SimpleNamespace(logger_manager=manager, engine_core=SimpleNamespace(get_output_async=get_output_async)), recorded


def take(client, statistics):
    """Take an output of rank 1 as vLLM's handler does."""
    asyncio.run(client.engine_core.get_output_async())
    client.logger_manager.record(engine_idx=1, scheduler_stats=statistics, iteration_stats="i")


def test_figures_are_as_old_as_their_step(made):
    """Not as their arrival, and those without figures do not count: most outputs have none."""
    second = made.instances[1]
    second.use(SimpleNamespace(version="1"), {}, 2)
    client, recorded = a_front_end_of_vllm(iter([SimpleNamespace(timestamp=5.0), SimpleNamespace(timestamp=6.0)]))
    second._noting(client)
    take(client, None)
    assert struct.unpack("4d", second._figures) == (0.0,) * 4
    take(client, "s")
    assert struct.unpack("4d", second._figures) == (0.0, 0.0, 0.0, 6.0)
    assert recorded[1] == (("s",), {"engine_idx": 1, "iteration_stats": "i"})


def test_a_busy_instance_does_not_publish_an_earlier_step(made):
    """The engine's last step went to the first; the second takes the one before it later."""
    gauge = SimpleNamespace(name="n", type="gauge", samples=[SimpleNamespace(labels={"engine": "1"})])
    for one, step in zip(made.instances, (2.0, 1.0), strict=True):
        one.use(SimpleNamespace(version="1"), {}, 2)
        client, _ = a_front_end_of_vllm(iter([SimpleNamespace(timestamp=step)]))
        one._noting(client)
        take(client, "s")
    first, second = made.instances
    assert first.latest([gauge])[0].samples == gauge.samples
    assert second.latest([gauge])[0].samples == []


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
    monkeypatch.setattr(load, "_start", lambda *_: pytest.fail("it starts"))
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
    assert load._publish(prepared, None, {}, Log()) is None
