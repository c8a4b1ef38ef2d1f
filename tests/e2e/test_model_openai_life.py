"""Both APIs of one model end together: an unload, and the end of the server. test_model_engine_death.py ends the engine."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from support.event_stream import EventStream
from support.instances import with_instances
from support.model_control import load, unload
from support.model_requests import prompt
from support.open_stream import OpenStream
from support.patience import wait_for
from support.reference import ONE_THREAD
from support.settings import openai_url, with_openai, with_parameter
from support.triton_client import get, post
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from pathlib import Path

    from support.serving import Serve
    from vllm_env.serve.server import TritonServer

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("long_server")]
TEXT = "/v1/completions"
PROMPT, _ = FACTS[2]
LONG = {"model": "vllm", "prompt": PROMPT, "temperature": 0, "max_tokens": 60_000, "ignore_eos": True, "stream": True}
SHORT = {"model": "vllm", "prompt": PROMPT, "max_tokens": 1}
UNLOADED = "the model was unloaded before the request had finished"


@pytest.mark.slow
def test_an_unload_lets_requests_finish_and_then_says_so(long_server: TritonServer) -> None:
    """New ones are refused meanwhile; afterwards the port is closed, and the next load has it again."""
    url = openai_url(long_server)
    with EventStream(url, TEXT, LONG) as stream, ThreadPoolExecutor(1) as pool:
        stream.wait(3)
        unloading = pool.submit(unload, long_server)
        wait_for(lambda: get(url, "/health")[0] == 503, "the unload")
        status, text = post(url, TEXT, SHORT, timeout=60)
        assert (status, json.loads(text)["error"]["message"]) == (503, "the model is being unloaded")
        assert UNLOADED in stream.error()  # before 0.30 after the status
        assert unloading.result()[0] == 200
    wait_for(lambda: _is_closed(url), "the end of the port")
    assert load(long_server)[0] == 200
    assert post(url, TEXT, SHORT, timeout=300)[0] == 200


@pytest.mark.slow
def test_two_models_have_a_port_each(long_server: TritonServer) -> None:
    """Each answers under its name. A third with the port of the first is refused, and the first goes on."""
    url = openai_url(long_server)
    for name in ("second", "third"):
        shutil.copytree(long_server.repository / "vllm", long_server.repository / name)
    with_openai(long_server.repository / "second")
    assert load(long_server, "second")[0] == 200
    others = openai_url(long_server, "second")
    for place, name, other in ((url, "vllm", "second"), (others, "second", "vllm")):
        (model,) = json.loads(get(place, "/v1/models")[1])["data"]
        assert model["id"] == name
        status, text = post(place, TEXT, {**SHORT, "model": name}, timeout=300)
        assert (status, json.loads(text)["model"]) == (200, name)
        assert post(place, TEXT, {**SHORT, "model": other}, timeout=300)[0] == 404
    with EventStream(url, TEXT, LONG) as stream:
        stream.wait(3)
        status, text = load(long_server, "third")
        port = urlsplit(url).port
        assert status == 400
        assert f"OPENAI_PORT: port {port} of 127.0.0.1 is taken, by another model" in json.loads(text)["error"]
        seen = len(stream.events)
        stream.wait(seen + 3)
    assert unload(long_server, "second")[0] == 200
    wait_for(lambda: _is_closed(others), "the end of the second model's port")
    assert post(url, TEXT, SHORT, timeout=300)[0] == 200


@pytest.mark.slow
def test_two_instances_let_both_kinds_of_requests_finish(
    serving: Serve, long_arguments: dict[str, object], no_leftovers: None
) -> None:
    """SIGTERM with requests of both APIs in both, some of which wait: each is told, the status is 0, and no process is left."""

    def prepare(model: Path) -> None:
        with_instances(model, 2)
        with_openai(model)
        with_parameter(model, "UNLOAD_GRACE_SECONDS", "3")

    def asked(api: str) -> set[str]:
        text = pair.log.read_text(errors="replace")
        return set(re.findall(rf"pid=(\d+)\).*Added request {api}-", text))

    engine = {**long_arguments, "enable_log_requests": True}
    tensors = prompt(PROMPT, {"max_tokens": 60_000, "ignore_eos": True}, stream=True)
    with serving(engine, environment=ONE_THREAD, prepare=prepare) as pair:
        members = pair.members()
        with ExitStack() as stack:
            ours: list[EventStream] = []
            tritons: list[OpenStream] = []
            # The kernel chooses the instance of a connection.
            while len(asked("cmpl")) < 2 or len(asked("triton")) < 2:
                assert len(ours) < 64, "one instance gets no requests"
                ours.append(stack.enter_context(EventStream(openai_url(pair), TEXT, LONG)))
                tritons.append(stack.enter_context(OpenStream(pair.grpc_url, tensors)))
                wait_for(lambda: pair.log.read_text(errors="replace").count("Added request cmpl-") >= len(ours), "the request")
                wait_for(
                    lambda: pair.log.read_text(errors="replace").count("Added request triton-") >= len(tritons), "the request"
                )
            wait_for(lambda: any(stream.events for stream in ours), "an answer that has begun")
            os.kill(pair.pid, signal.SIGTERM)
            ends = {_told(stream) for stream in ours}
            assert {UNLOADED} <= ends <= {UNLOADED, "503"}
            assert {stream.wait_end().error for stream in tritons} == {UNLOADED}
        wait_for(lambda: not pair.running, "the server's end")
        assert pair._child is not None
        assert pair._child.returncode == 0, pair.log.read_text(errors="replace")[-4000:]
        wait_for(lambda: not [process for process in members if process.is_running()], "the end of all its processes")
        assert "Exit timeout expired" not in pair.log.read_text(errors="replace")


def _told(stream: EventStream) -> str:
    """Return the error with which a stream ends. One that had to wait may not have begun."""
    stream.wait_end()
    return "503" if stream.status == 503 else stream.error()


def _is_closed(url: str) -> bool:
    try:
        get(url, "/health", timeout=5)
    except (OSError, http.client.HTTPException):
        return True
    return False


@pytest.mark.ends_server
def test_the_servers_end_lets_both_kinds_of_requests_finish(long_server: TritonServer) -> None:
    """SIGTERM: both are told, the status is 0, and no process is left."""
    members = long_server.members()
    asked = prompt(PROMPT, {"max_tokens": 60_000, "ignore_eos": True}, stream=True)
    with EventStream(openai_url(long_server), TEXT, LONG) as ours, OpenStream(long_server.grpc_url, asked) as tritons:
        ours.wait(3)
        tritons.wait(3)
        os.kill(long_server.pid, signal.SIGTERM)
        assert UNLOADED in ours.error()
        assert tritons.wait_end().error == UNLOADED
    wait_for(lambda: not long_server.running, "the server's end")
    assert "Exit timeout expired" not in long_server.log.read_text(errors="replace")
    wait_for(lambda: not [process for process in members if process.is_running()], "the end of all its processes")
