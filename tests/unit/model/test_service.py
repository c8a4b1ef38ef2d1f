"""`1/model.py` from load to unload, with stand-ins for Triton's module and for vLLM, each time in a process of its own.

A load changes the process: its variables, its collector, a watch of the process that started it. The process prints a JSON
object of what happened.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHONPATH = os.pathsep.join(str(ROOT / folder) for folder in ("model_repository/vllm/1", "tests"))
PRELUDE = """
import json, sys, threading, time
import numpy as np
from support import fake_triton, fake_vllm
from support.patience import wait_for
triton = fake_triton.install()
fake_vllm.install()
from model import TritonPythonModel

COMPLETED = {
    "input": [{"name": "text_input"}], "output": [{"name": "text_output"}],
    "model_transaction_policy": {"decoupled": True},
}
ARGS = {
    "model_name": "mine", "model_version": "1", "model_repository": sys.argv[1],
    "model_instance_kind": "CPU", "model_instance_device_id": "0",
    "model_config": json.dumps({**COMPLETED, "parameters": {}}),
}

def request(text, **tensors):
    given = {"text_input": np.array([text.encode()], np.object_), "exclude_input_in_output": np.array([True]), **tensors}
    return fake_triton.Request(given)

def answered(*requests):
    wait_for(lambda: all(r.sender.sent and r.sender.sent[-1][1] == fake_triton.FINAL for r in requests), "the answers")

def pieces(r):
    return [t.as_numpy()[0].decode() for response, _ in r.sender.sent for t in response.output_tensors]

def errors(r):
    return [(response.error.code, response.error.message) for response, _ in r.sender.sent if response.error]

def threads():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("triton-") and "watch" not in t.name)

log = triton.Logger.lines
model = TritonPythonModel()
"""


@pytest.fixture
def run(tmp_path):
    """Run code with a loaded model's folder; return what it has printed as JSON."""
    folder = tmp_path / "models" / "mine"
    (folder / "1").mkdir(parents=True)
    cache = tmp_path / "cache"

    def run(code, **engine_args):
        (folder / "vllm_engine_args.json").write_text(json.dumps({"model": "echo", **engine_args}))
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "VLLM_CACHE_ROOT": str(cache)}
        command = [sys.executable, "-c", PRELUDE + code, str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


GROUPS = """
ARGS["model_instance_name"] = "a_0"
ARGS["model_config"] = json.dumps({
    **COMPLETED,
    "parameters": {"OPERATOR_REQUESTS": {"string_value": "sleep"}},
    "instance_group": [{"name": "a", "count": 1}, {"name": "b", "count": 1}],
})
try:
    model.initialize(ARGS)
    model.finalize()
    said = ""
except Exception as error:
    said = str(error)
print(json.dumps(said))
"""


def test_operator_requests_are_refused_where_several_engines_serve(run):
    """Triton gives one to any of them, whose answer would be for all."""
    assert run(GROUPS, model="echo").startswith("OPERATOR_REQUESTS is for a model with one engine")


CLIPS = """
import os
from triton_vllm.media import clips
from triton_vllm.media.video import Header
clips.read_header = lambda data: Header(frames=6, rate=1.0, width=1, height=1)
ARGS["model_config"] = json.dumps({
    **COMPLETED,
    "parameters": {"MAX_CLIP_SECONDS": {"string_value": "5"}},
})
model.initialize(ARGS)
content = [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}]
film = fake_triton.Request({"messages": np.array([json.dumps([{"role": "user", "content": content}]).encode()], np.object_)})
model.execute([film])
answered(film)
model.finalize()
print(json.dumps({"film": errors(film), "audio": os.environ.get("VLLM_MAX_AUDIO_DECODE_DURATION_S")}))
"""


def test_limits_of_audio_and_video_reach_those_who_measure(run, monkeypatch):
    """vLLM measures audio, we the videos."""
    monkeypatch.delenv("VLLM_MAX_AUDIO_DECODE_DURATION_S", raising=False)
    seen = run(CLIPS, model="echo")
    assert seen["audio"] == "5"
    assert seen["film"] == [
        ["INVALID_ARG", "messages[0].content[0].video_url has 6 seconds; this model takes at most 5"],
    ]


FAILS = """
try:
    model.initialize(ARGS)
except Exception as error:
    print(json.dumps({"kind": type(error).__name__, "text": str(error), "after": threads(), "log": log}))
"""


SMALL_MEMORY = """
import os
from types import SimpleNamespace
from support import fake_vllm

def full(args, usage_context):
    raise OSError(28, "No space left on device")

fake_vllm.AsyncLLM.from_engine_args = full
statvfs = os.statvfs
small = SimpleNamespace(f_frsize=4096, f_blocks=256, f_bavail=1)
os.statvfs = lambda path: small if path == "/dev/shm" else statvfs(path)
"""


def test_a_load_for_which_shared_memory_is_too_small_says_so(run):
    """Triton's reason names the file system, and the option of a container that makes it larger."""
    text = run(SMALL_MEMORY + FAILS, model="echo")["text"]
    assert "OSError: [Errno 28] No space left on device; /dev/shm has 1 MiB, of which 0 MiB are free" in text
    assert "docker run --shm-size=1g" in text


PARSERS = """
from triton_vllm.request import generate
assembler, broken = generate.Assembler, [KeyError("secret")]

def fails_once(*args, **options):
    if broken:
        raise broken.pop()
    return assembler(*args, **options)

generate.Assembler = fails_once
model.initialize(ARGS)
first, second, unread = request("a"), request("b"), request("c")
unread.inputs = lambda: 1 / 0
model.execute([first, unread, second])
answered(first, unread, second)
causes = [name for name in ("KeyError", "ZeroDivisionError") if any(name in text for _, text in log)]
print(json.dumps([errors(first), errors(unread), pieces(second), causes]))
model.finalize()
"""


def test_an_unexpected_error_refuses_one_request_alone(run):
    """Its reason is in the log and not in the answer; the next request of the batch is served."""
    told = [["INTERNAL", "the request could not be prepared; the server's log has the details"]]
    assert run(PARSERS, model="echo") == [told, told, ["b"], ["KeyError", "ZeroDivisionError"]]


STATISTICS = """
chosen = []
for parameters in ({}, {"REPORT_CUSTOM_METRICS": {"string_value": "true"}}):
    ARGS["model_config"] = json.dumps({**COMPLETED, "parameters": parameters})
    model = TritonPythonModel()
    model.initialize(ARGS)
    chosen.append(model._service._model.engine._llm.args.disable_log_stats)
    model.finalize()
print(json.dumps(chosen))
"""


def test_vllm_counts_only_what_is_published(run):
    """Its counters are moved for each step of the model; the operator's own choice stays."""
    assert run(STATISTICS) == [True, False]
    assert run(STATISTICS, disable_log_stats=False) == [False, False]
    assert run(STATISTICS, otlp_traces_endpoint="http://x") == [False, False]  # vLLM makes its traces of them


SAMPLED = """
sampled = []
from triton_vllm import vllm_api

async def sample_once(vllm, llm):
    sampled.append(vllm.SamplingParams is not None and llm.errored)

vllm_api.sample_once = sample_once
model.initialize(ARGS)
model.finalize()
print(json.dumps(sampled))
"""


def test_no_request_waits_for_the_sampler_on_a_cpu(run):
    """The engine samples a token while the model is loaded."""
    assert run(SAMPLED) == [False]


STOPPED_SERVER = """
import os, signal
from triton_vllm.base.processes import is_stopped
from triton_vllm.reply.stuck import LOOKS
from triton_vllm.startup.load import GIVEN_UP

server = os.getpid()
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    model.initialize(ARGS)
    loaded = model._service._model
    loaded.engine._end_process = lambda _: None
    watch = loaded.send_watch
    watch.close()  # from here on it looks when it is asked to
    entered, may_return = threading.Event(), threading.Event()
    r = request("never taken")
    send = r.sender.send
    r.sender.send = lambda *given, **named: (entered.set(), may_return.wait(), send(*given, **named))
    model.execute([r])
    entered.wait()
    os.kill(server, signal.SIGSTOP)
    wait_for(lambda: is_stopped(server), "the stop")
    for _ in range(2 * LOOKS):
        watch.look()
    stopped = watch._told
    os.kill(server, signal.SIGCONT)
    wait_for(lambda: not is_stopped(server), "the server that goes on")
    for _ in range(LOOKS + 1):
        watch.look()
    wait_for(lambda: any(GIVEN_UP in text for _, text in log), "the end of the model")
    print(json.dumps([stopped, watch._told]), flush=True)
    may_return.set()
    model.finalize()
finally:
    os.kill(server, signal.SIGCONT)
"""


def test_a_server_that_stands_still_ends_no_model(run):
    """In a debugger, for example. A send that the running server does not take ends it."""
    assert run(STOPPED_SERVER) == [False, True]
