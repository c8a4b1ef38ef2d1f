"""Several instances of a model are front ends of one engine: they answer, lose and get back the same one, and leave nothing."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from support import server_processes
from support.instances import answers_of_all, instances_asked, opened_in_all, said, with_instances
from support.kill import kill_at_rest
from support.metrics_page import read_metrics
from support.model_control import load, unload
from support.model_requests import ask, ask_all, prompt
from support.models import LONG_POSITIONS
from support.open_stream import OpenStream
from support.patience import pause, wait_for
from support.reference import ONE_THREAD
from support.server_processes import stubs
from support.settings import openai_url, with_metrics, with_openai, with_parameter
from support.triton_client import post
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.model_requests import Answer
    from support.models import MadeModels
    from support.serving import Serve
    from vllm_env.serve.server import TritonServer

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("llama_server")]  # which answers as one instance
PROMPT, ANSWER = FACTS[2]
LONG = {"temperature": 0, "max_tokens": 60_000, "ignore_eos": True}
GREEDY = {"temperature": 0, "max_tokens": 24}
ANSWERED = "vllm:request_success_total"
DEAD = "Model is unavailable due to unhealthy vLLM engine"
UNLOADED = "the model was unloaded before the request had finished"
FOLDERS = "vllm_env_frontends_*"
NAMES = (None, "one", "two")
PATIENCE = 300.0
FIRST = 2  # instances at first: each of them costs an import of vLLM
COUNT = 3  # after the reload: where one of them dies, the others compete to lead
MANY = 16  # requests of which each instance gets some, unless the machine is busy
MOST = 48  # requests in flight
ROUNDS = 4  # so that each of a few instances gets requests of each kind
ASLEEP = "the model is asleep; an operator request wakes it up"


def engines(server: TritonServer) -> set[psutil.Process]:
    """Return the engines of a server once they stay the same; what one forks has its name until it is another program."""
    seen: set[psutil.Process] = set()
    while True:
        found = server_processes.engines(server)
        if found == seen:
            return found
        seen = found
        pause(1)


def errors(server: TritonServer) -> set[str]:
    """Return the errors of many requests in a row, "" for a request that is answered."""
    return {answer.error for answer in ask_all(server, [prompt(PROMPT, {"max_tokens": 1})] * MANY)}


def is_served(server: TritonServer) -> bool:
    """Return whether many requests in a row are."""
    return errors(server) == {""}


def order(operation: str, **arguments: str) -> dict[str, object]:
    """Return an operator's request."""
    return {"operator_request": json.dumps({"operation": operation, **arguments})}


def operate(server: TritonServer, operation: str, **arguments: str) -> dict[str, object]:
    """Return what an operator is told."""
    (answer,) = ask_all(server, [order(operation, **arguments)])
    assert answer.error == ""
    told: dict[str, object] = json.loads(answer.text)
    return told


def says_awake(server: TritonServer) -> bool:
    """Return whether the metrics say that the engine is awake."""
    page = read_metrics(f"http://127.0.0.1:{server.ports.metrics}/metrics")
    (value,) = {value for name, labels, value in page.samples if labels.get("sleep_state") == "awake"}
    return value == 1


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LORA_DIRECTORY of `group`, empty at first."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def group(serving: Serve, made_models: MadeModels, adapters: Path) -> Iterator[TritonServer]:
    """Two instances with adapters, three after their reload; these tests break the server."""

    def prepare(model: Path) -> None:
        names = dict(zip(("one", "two"), map(str, made_models.adapters), strict=True))
        (model / "multi_lora.json").write_text(json.dumps(names), encoding="utf-8")
        with_instances(model, FIRST)
        with_parameter(model, "LORA_DIRECTORY", str(adapters))
        with_parameter(model, "MAX_REQUESTS_IN_FLIGHT", str(MOST))
        with_parameter(model, "OPERATOR_REQUESTS", "sleep, wake_up, load_lora")
        with_metrics(model)
        with_openai(model)

    engine = {
        "model": str(made_models.llama),
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_loras": 2,
        "enable_log_requests": True,
        "max_num_seqs": 2,
        "max_model_len": LONG_POSITIONS,
        "hf_overrides": {"max_position_embeddings": LONG_POSITIONS},  # rotary, so that it needs no other weights
    }
    arguments = ("--model-control-mode=explicit", "--load-model=vllm")
    with serving(engine, environment=ONE_THREAD, arguments=arguments, prepare=prepare) as running:
        yield running


def test_instances_answer_from_one_engine(group: TritonServer) -> None:
    """Each gets requests, answers as one alone does, and the metrics of all together are the engine's."""
    asked = [prompt(PROMPT, GREEDY, stream=number % 2 == 0, exclude_input_in_output=True) for number in range(MANY)]
    answers = answers_of_all(group, asked, FIRST)
    assert {answer.text for answer in answers} == {ANSWER}
    assert len(engines(group)) == 1
    assert len(stubs(group)) == FIRST
    page = functools.partial(read_metrics, f"http://127.0.0.1:{group.ports.metrics}/metrics")
    wait_for(lambda: page().total(ANSWERED) == len(answers))
    wait_for(lambda: page().total("vllm:num_requests_running") == 0)  # an instance that saw more at its last step says nothing
    assert page().total(ANSWERED) == len(answers)


@pytest.mark.slow
def test_instances_answer_as_one_does(group: TritonServer, llama_server: TritonServer) -> None:
    """Also with the adapters."""
    asked = [prompt(PROMPT, {**GREEDY, "lora_name": name} if name else GREEDY) for name in NAMES]
    alone = [ask_all(llama_server, [one])[0].text for one in asked]
    for one, expected in zip(asked, alone, strict=True):
        assert {answer.text for answer in answers_of_all(group, [one] * MANY, FIRST)} == {expected}
    assert len(set(alone)) == 3
    assert len(engines(group)) == 1
    assert len(stubs(group)) == FIRST


def test_instances_share_the_port_of_the_openai_server(group: TritonServer) -> None:
    """The kernel chooses one for each connection, and each has the metrics of all."""
    start = len(said(group))
    url = openai_url(group)
    tritons = functools.partial(read_metrics, f"http://127.0.0.1:{group.ports.metrics}/metrics")
    before = read_metrics(f"{url}/metrics").total(ANSWERED)  # with the sample that the load takes
    counted = tritons().total(ANSWERED)
    for _ in range(4 * MANY):
        status, text = post(url, "/v1/completions", {"model": "two", "prompt": PROMPT, "max_tokens": 1}, timeout=300)
        assert status == 200, text
    assert len(set(re.findall(r"pid=(\d+)\).*Added request cmpl-", said(group, start)))) == FIRST
    pages = [read_metrics(f"{url}/metrics") for _ in range(MANY)]
    assert {page.total(ANSWERED) for page in pages} == {before + 4 * MANY}
    wait_for(lambda: tritons().total(ANSWERED) == counted + 4 * MANY)
    assert len(engines(group)) == 1


@pytest.mark.slow
def test_a_changed_adapter_is_seen_by_all_instances(
    group: TritonServer, llama_server: TritonServer, made_models: MadeModels, adapters: Path
) -> None:
    """By the next request of each; they have one copy of it."""
    copies = set()
    for name, adapter in zip(("one", "two"), made_models.adapters, strict=True):
        start = len(said(group))
        shutil.rmtree(adapters / "changing", ignore_errors=True)
        shutil.copytree(adapter, adapters / "changing")
        expected = ask(llama_server, PROMPT, {**GREEDY, "lora_name": name}).text
        asked = [prompt(PROMPT, {**GREEDY, "lora_name": "changing"})] * MANY
        assert {answer.error or answer.text for answer in answers_of_all(group, asked, FIRST)} == {expected}

        def loaded(start: int = start) -> list[str]:
            return re.findall(r"LoRA adapter changing@(\w+) was loaded", said(group, start))

        wait_for(lambda loaded=loaded: len(loaded()) >= FIRST, "the log's lines")
        assert len(loaded()) == FIRST
        copies |= set(loaded())
    assert group._scratch is not None
    assert len(list(group._scratch.glob(f"{FOLDERS}/load-*/adapters/*"))) == len(copies) == 2


def test_cancellations_reach_the_engine_from_each_instance(group: TritonServer) -> None:
    """Running and waiting requests of all are given up, and the next one gets a slot."""
    with ExitStack() as stack:
        streams = opened_in_all(group, stack, [prompt(PROMPT, LONG, stream=True)] * MANY, FIRST)
        wait_for(lambda: any(stream.events for stream in streams))
        for stream in streams:
            stream.cancel()
        assert all("CANCELLED" in stream.wait_end(PATIENCE).status for stream in streams)
        assert is_served(group)


def test_the_limit_counts_the_requests_of_all_instances(group: TritonServer) -> None:
    """Each of the two has room for more."""
    start = len(said(group))
    with ExitStack() as stack:
        streams = opened_in_all(group, stack, [prompt(PROMPT, LONG, stream=True)] * MANY, FIRST)
        while len(streams) < MOST:
            streams.append(stack.enter_context(OpenStream(group.grpc_url, prompt(PROMPT, LONG, stream=True))))
        wait_for(lambda: said(group, start).count("Added request triton-") == MOST)
        refused = {answer.error for answer in ask_all(group, [prompt(PROMPT, GREEDY)] * MANY)}
        assert refused == {f"{MOST} requests are in flight, and no more are taken: try again later"}
        for stream in streams:
            stream.cancel()
    wait_for(lambda: is_served(group))


@contextmanager
def sleep_that_waits(group: TritonServer) -> Iterator[tuple[OpenStream, OpenStream]]:
    """Give a stream, and a `sleep` that waits for its end; every instance refuses what is new."""
    with ExitStack() as stack:
        stream = stack.enter_context(OpenStream(group.grpc_url, prompt(PROMPT, LONG, stream=True)))
        stream.wait()
        sleep = stack.enter_context(OpenStream(group.grpc_url, order("sleep")))
        wait_for(lambda: errors(group) == {ASLEEP})
        yield stream, sleep


@pytest.mark.slow
def test_an_operator_puts_all_instances_to_sleep(group: TritonServer) -> None:
    """Whichever gets the request: all refuse what is new, what is in flight in any ends first, and any wakes them up."""
    for _ in range(ROUNDS):
        with sleep_that_waits(group) as (stream, sleep):
            assert (sleep.events, stream.ended) == ([], False)
            stream.cancel()
            sleep.wait_end(PATIENCE)
            assert json.loads(sleep.events[0].text) == {"operation": "sleep", "asleep": True}
        assert errors(group) == {ASLEEP}
        wait_for(lambda: not says_awake(group))
        pause(2)  # the other instance has published its figures, too
        assert not says_awake(group)
        assert operate(group, "wake_up") == {"operation": "wake_up", "asleep": False}
        assert is_served(group)
        wait_for(lambda: says_awake(group))


@pytest.mark.slow
def test_an_operator_calls_a_sleep_off_through_any_instance(group: TritonServer) -> None:
    """The request for which it waits goes on, and all take requests again."""
    for _ in range(ROUNDS):
        with sleep_that_waits(group) as (stream, sleep):
            assert operate(group, "wake_up") == {"operation": "wake_up", "asleep": False}
            assert sleep.wait_end(PATIENCE).error == "wake_up was asked for before the requests in flight had ended"
            assert is_served(group)
            assert not stream.ended


@pytest.mark.slow
def test_an_operator_has_an_adapter_loaded_again_for_all_instances(
    group: TritonServer, made_models: MadeModels, adapters: Path
) -> None:
    """The one that was asked does it at once, the others at their next request, once."""
    shutil.copytree(made_models.adapters[0], adapters / "again")
    asked = [prompt(PROMPT, {"max_tokens": 1, "lora_name": "again"})] * MANY
    assert {answer.error for answer in ask_all(group, asked)} == {""}
    start = len(said(group))
    version = operate(group, "load_lora", name="again")["version"]
    wait_for(lambda: {answer.error for answer in ask_all(group, asked)} == {""} and len(instances_asked(group, start)) == FIRST)

    def loaded() -> list[str]:
        return re.findall(r"LoRA adapter (\S+) was loaded", said(group, start))

    wait_for(lambda: len(loaded()) >= FIRST)
    assert loaded() == [version] * FIRST


def test_a_killed_engine_comes_back_for_all_instances(group: TritonServer, made_models: MadeModels, adapters: Path) -> None:
    """Whoever waits in any is told, then one engine serves all again.

    The new engine has no adapter at first. vLLM reads an adapter's copy with the next request that names it.
    """
    start = len(said(group))
    shutil.copytree(made_models.adapters[1], adapters / "sql")
    before = ask(group, PROMPT, {**GREEDY, "lora_name": "sql"}).text
    (killed,) = engines(group)
    with ExitStack() as stack:
        streams = [stack.enter_context(OpenStream(group.grpc_url, prompt(PROMPT, LONG, stream=True))) for _ in range(MANY)]
        wait_for(lambda: any(stream.events for stream in streams))
        os.kill(killed.pid, signal.SIGKILL)
        assert {stream.wait_end(PATIENCE).error for stream in streams} == {DEAD}
    wait_for(lambda: said(group, start).count("the engine is back") == FIRST)
    assert is_served(group)
    (again,) = engines(group)
    assert again != killed
    assert ask(group, PROMPT, GREEDY).text == PROMPT + ANSWER != before
    with_adapter = [prompt(PROMPT, {**GREEDY, "lora_name": "sql"})] * MANY
    assert {answer.error or answer.text for answer in ask_all(group, with_adapter)} == {before}
    shutil.rmtree(adapters / "sql")


@pytest.mark.slow
def test_instances_that_are_unloaded_leave_nothing_and_are_loaded_again(group: TritonServer) -> None:
    """No process, no folder; the second load has another number of instances and an engine of its own, once."""
    start = len(said(group))
    before = engines(group)
    assert unload(group)[0] == 200
    wait_for(lambda: not stubs(group) and not engines(group))
    assert group._scratch is not None
    assert not list(group._scratch.glob(FOLDERS))
    assert "starting it again" not in said(group, start)
    with_instances(group.repository / "vllm", COUNT)
    status, told = load(group)
    assert status == 200, f"{told}\n{said(group, start)[-4000:]}"
    assert len(stubs(group)) == COUNT
    assert len(engines(group)) == 1
    assert engines(group) != before
    assert is_served(group)


@pytest.mark.slow
def test_a_killed_instance_that_led_is_replaced_by_another(group: TritonServer) -> None:
    """Its engine ends with it; another instance starts one for those that are left."""
    start = len(said(group))
    (killed,) = engines(group)
    leader = killed.ppid()
    assert leader in {stub.pid for stub in stubs(group)}
    kill_at_rest(leader)
    wait_for(lambda: said(group, start).count("the engine is back") == COUNT - 1)
    (again,) = engines(group)
    assert again.ppid() in {stub.pid for stub in stubs(group)} - {leader}
    # the server goes on to give requests to the instance that was killed, and says that they have failed
    wait_for(lambda: PROMPT + ANSWER in {text for answer in answered(group) for text in answer.texts()})


@pytest.mark.slow
def test_an_instance_that_is_killed_in_a_sleep_is_replaced_by_one_that_is_awake(group: TritonServer) -> None:
    """The killed one led. What it had put to sleep has ended with it, and nobody need wake up the new engine."""
    start = len(said(group))
    (sleeping,) = engines(group)
    # The server also gives requests to the instance that the test before this has killed.
    wait_for(lambda: not ask_all(group, [order("sleep")])[0].error)
    assert ASLEEP in errors(group)
    kill_at_rest(sleeping.ppid())
    wait_for(lambda: "the engine is back" in said(group, start))
    wait_for(lambda: PROMPT + ANSWER in {text for answer in answered(group) for text in answer.texts()})


def answered(server: TritonServer) -> list[Answer]:
    """Return the answers, without errors, to a few requests."""
    return [answer for answer in ask_all(server, [prompt(PROMPT, GREEDY)] * 4) if not answer.error]


def test_what_is_in_flight_in_all_instances_is_answered_when_the_server_ends(
    light_serving: Serve, light_long_arguments: dict[str, object]
) -> None:
    """SIGTERM: each request is told UNAVAILABLE after the grace period, the server ends well, and the folder is gone.

    On a server of its own: where an instance was killed, Triton 24.10 never ends an unload.
    """

    def prepare(model: Path) -> None:
        with_instances(model, FIRST)
        with_parameter(model, "UNLOAD_GRACE_SECONDS", "3")

    with light_serving({**light_long_arguments, "enable_log_requests": True}, environment=ONE_THREAD, prepare=prepare) as pair:
        with ExitStack() as stack:
            requests = [prompt(PROMPT, LONG, stream=number % 2 == 0) for number in range(MANY)]
            streams = opened_in_all(pair, stack, requests, FIRST)
            os.kill(pair.pid, signal.SIGTERM)
            assert {stream.wait_end(PATIENCE).error for stream in streams} == {UNLOADED}
        assert pair._child is not None
        wait_for(lambda: not pair.running)
        assert pair._child.returncode == 0, said(pair)[-4000:]
        assert pair._scratch is not None
        assert not list(pair._scratch.glob(FOLDERS))
