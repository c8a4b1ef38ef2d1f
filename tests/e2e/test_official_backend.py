"""The official backend's own tests, rebuilt from what they document: names, texts and counts, under `COMPATIBILITY=official`.

One server for all of them; the last test takes its engine away.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
import tritonclient.grpc as grpcclient

from support.metrics_page import read_metrics
from support.model_requests import STRANGE, Answer, ask, ask_all, prompt
from support.patience import wait_for, wait_for_line
from support.reference import ONE_THREAD
from support.server_processes import engines
from support.settings import with_parameter
from support.triton_client import generate, get, is_ready, tensor
from triton_vllm.base.dialect import HISTOGRAMS
from triton_vllm.base.official import CANCELLED, CANCELLING
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.metrics_page import Metrics
    from support.models import MadeModels
    from support.serving import Serve
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, ANSWER = FACTS[2]
GREEDY = {"temperature": "0", "top_p": "1"}  # strings, as its tests send them
TOKENS = 16  # vLLM's own limit, which its tests rely on
FLAGS = {
    "return_finish_reason": "finish_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
}
ECHO = "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
DEAD = "Model is unavailable due to unhealthy vLLM engine"
UNKNOWN = "Request for unknown model: 'vllm' has no available versions"
PARAMETERS = {
    "COMPATIBILITY": "official",
    "REPORT_CUSTOM_METRICS": "true",
    "ENABLE_VLLM_HEALTH_CHECK": "true",
    "ENGINE_TIMEOUT_SECONDS": "1800",  # a test lets the engine stand still
}


@pytest.fixture(scope="module")
def official(serving: Serve, made_models: MadeModels) -> Iterator[TritonServer]:
    """A server with the official backend's behaviour, metrics and health check, and two adapters."""

    def prepare(model: Path) -> None:
        names = dict(zip(("doll", "sheep"), map(str, made_models.adapters), strict=True))
        (model / "1" / "multi_lora.json").write_text(json.dumps(names), encoding="utf-8")
        for name, value in PARAMETERS.items():
            with_parameter(model, name, value)

    control = ("--model-control-mode=explicit", "--load-model=vllm")
    engine = {"model": str(made_models.llama), "enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with serving(engine, environment=ONE_THREAD, prepare=prepare, arguments=control) as running:
        yield running


def metrics_of(server: TritonServer) -> Metrics:
    """Return the samples of Triton's metrics page."""
    return read_metrics(f"http://127.0.0.1:{server.ports.metrics}/metrics")


def page_of(server: TritonServer) -> str:
    """Return the text of Triton's metrics page."""
    return get(f"http://127.0.0.1:{server.ports.metrics}", "/metrics")[1]


def test_metrics_have_the_official_names_kinds_labels_buckets_and_counts(official: TritonServer) -> None:
    """The first test: nothing has been counted before it, and so its numbers are the whole page's."""
    texts = STRANGE[:3] * 2
    asked = {**GREEDY, "ignore_eos": True}  # its model does not come to an end within its tests' tokens
    answers = ask_all(official, [prompt(t, asked, return_num_input_tokens=True) for t in texts], parameters=GREEDY)
    assert not [answer.error for answer in answers if answer.error]
    prompts = sum(answer.values("num_input_tokens")[0][0] for answer in answers)
    families = {name for name, _ in HISTOGRAMS.values()}
    counts = dict.fromkeys((f"{name}_count" for name in families), len(texts))
    counts["vllm:time_per_output_token_seconds_count"] = (TOKENS - 1) * len(texts)
    generated = TOKENS * len(texts)
    counts |= dict.fromkeys(("vllm:prompt_tokens_total", "vllm:request_prompt_tokens_sum"), prompts)
    counts |= dict.fromkeys(("vllm:generation_tokens_total", "vllm:request_generation_tokens_sum"), generated)
    counts["vllm:request_params_n_sum"] = len(texts)
    wait_for(lambda: {name: metrics_of(official).total(name) for name in counts} == counts, "the metrics")
    found = metrics_of(official)
    assert all(labels.keys() - {"le"} == {"model", "version"} for labels in found.labels("vllm:"))
    expected = {"vllm:prompt_tokens_total", "vllm:generation_tokens_total"}
    expected |= {f"{name}_{suffix}" for name in families for suffix in ("count", "sum", "bucket")}
    assert found.names("vllm:") == expected
    types = {line.split()[2]: line.split()[3] for line in page_of(official).splitlines() if line.startswith("# TYPE vllm:")}
    assert types == dict.fromkeys(expected, "counter")
    assert {name: found.total(name) for name in counts} == counts
    for name, bounds in HISTOGRAMS.values():
        ends = [(float(labels["le"]), value) for sample, labels, value in found.samples if sample == f"{name}_bucket"]
        assert not [labels for sample, labels, _ in found.samples if sample == f"{name}_bucket" and labels["le"].endswith(".0")]
        assert found.total(f"{name}_sum") > 0
        assert max(ends) == (float("inf"), found.total(f"{name}_count"))
        if bounds:
            assert tuple(sorted(le for le, _ in ends))[:-1] == bounds


def test_metrics_count_a_request_of_several_answers_once(official: TritonServer) -> None:
    """All its tokens, its prompt once; a client that looks right after the answer finds them soon."""
    before = metrics_of(official)
    answer = ask(official, PROMPT, {**GREEDY, "n": 2, "temperature": "1", "ignore_eos": True}, exclude_input_in_output=True)
    assert [len(values) for values in answer.values("text_output")] == [2]
    grown = {
        "vllm:generation_tokens_total": 2 * TOKENS,
        "vllm:request_params_n_sum": 2.0,
        "vllm:request_params_n_count": 1.0,
    }
    wait_for(lambda: {n: metrics_of(official).total(n) - before.total(n) for n in grown} == grown, "the metrics")


@pytest.mark.parametrize("logprobs", [None, "0", "2"])
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_null_or_one_entry_a_token(official: TritonServer, logprobs: str | None, stream: bool) -> None:
    """Null is a JSON text, not an absent output; the tokens' texts are the answer's."""
    asked = {**GREEDY, "ignore_eos": True, **({} if logprobs is None else {"logprobs": logprobs})}
    flags = {"return_logprobs": True, "return_num_output_tokens": True, "return_cumulative_logprob": True}
    answer = ask(official, PROMPT, asked, stream=stream, **({} if stream else {"exclude_input_in_output": True}), **flags)
    assert answer.error == ""
    found = [json.loads(text) for (text,) in answer.values("logprobs")]
    if logprobs is None:
        assert found == [None] * len(answer.responses)
        return
    assert [len(positions) for positions in found] == [count for (count,) in answer.values("num_output_tokens")]
    positions = [entry for part in found for entry in part]
    assert all(len(entry) >= max(int(logprobs), 1) for entry in positions)
    chosen = [next(iter(entry.values())) for entry in positions]  # vLLM puts the sampled token first
    assert "".join(value["decoded_token"] for value in chosen).replace("</s>", "") == answer.text
    assert answer.values("cumulative_logprob")[-1] == [pytest.approx(sum(value["logprob"] for value in chosen), abs=1e-3)]


def test_additional_outputs_come_with_each_response_if_they_are_asked_for_and_only_then(official: TritonServer) -> None:
    """Every choice of outputs, streamed and whole, all at once: where it is asked for, one response a token none the less."""
    cases = [(stream, flags) for stream in (True, False) for flags in itertools.product((True, False), repeat=len(FLAGS))]
    asked = {**GREEDY, "logprobs": "1", "ignore_eos": True}
    requests = [prompt(STRANGE[0], asked, stream=stream, **dict(zip(FLAGS, flags, strict=True))) for stream, flags in cases]
    for (stream, flags), answer in zip(cases, ask_all(official, requests, parameters=GREEDY), strict=True):
        assert answer.error == ""
        assert len(answer.responses) == (TOKENS if stream else 1)
        wanted = {output for output, flag in zip(FLAGS.values(), flags, strict=True) if flag}
        assert all(response.tensors.keys() == {"text_output", *wanted} for response in answer.responses)
        check_outputs(answer, wanted)


def check_outputs(answer: Answer, wanted: set[str]) -> None:
    """Check the values of the outputs that were asked for."""
    if "finish_reason" in wanted:
        assert [v for (v,) in answer.values("finish_reason")] == [b"None"] * (len(answer.responses) - 1) + [b"length"]
    if "cumulative_logprob" in wanted:
        sums = [0.0, *(v for (v,) in answer.values("cumulative_logprob"))]
        assert all(new != old for old, new in itertools.pairwise(sums))
    if "logprobs" in wanted:
        positions = [entry for (text,) in answer.values("logprobs") for entry in json.loads(text)]
        assert len(positions) == TOKENS
        assert all(value.keys() == {"logprob", "rank", "decoded_token"} for entry in positions for value in entry.values())
    if "num_input_tokens" in wanted:
        assert len({v for (v,) in answer.values("num_input_tokens")}) == 1
    if "num_output_tokens" in wanted:
        assert answer.values("num_output_tokens") == [[TOKENS // len(answer.responses)]] * len(answer.responses)


def test_echo(official: TritonServer) -> None:
    """A whole answer has the prompt before it unless that is excluded; a streamed one never, and to ask for it is an error."""
    assert ask(official, PROMPT, GREEDY).text == ask(official, PROMPT, GREEDY, exclude_input_in_output=False).text
    assert ask(official, PROMPT, GREEDY).text == PROMPT + ANSWER
    assert ask(official, PROMPT, GREEDY, exclude_input_in_output=True).text == ANSWER
    for flags in ({}, {"exclude_input_in_output": True}):
        assert ask(official, PROMPT, GREEDY, stream=True, **flags).text == ANSWER
    assert ask(official, PROMPT, GREEDY, stream=True, exclude_input_in_output=False).error == ECHO


def test_structured_outputs_come_as_json_within_json(official: TritonServer) -> None:
    """Its test of a choice sends the constraint as a text."""
    choices = ["Positive", "Negative"]
    asked = {**GREEDY, "structured_outputs": json.dumps({"choice": choices})}
    assert ask(official, STRANGE[0], asked, exclude_input_in_output=True).text in choices


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"sampling_parameters": '{"max_tokens": "many"}'}, "max_tokens"),
        ({"sampling_parameters": "{"}, "sampling_parameters"),
        ({"sampling_parameters": '{"max_tokens": 100000}', "text_input": "long " * 400}, "maximum"),
        ({"embedding_request": '{"input": "x"}'}, "Model vllm does not support 'embed' request"),
    ],
)
def test_an_error_has_its_first_words(official: TritonServer, tensors: dict[str, str], reason: str) -> None:
    """The reason is ours. Its code is a unit test's: tritonserver 24.10 now and then crashes when it ends a stream with one."""
    answer = ask(official, None, **{"text_input": PROMPT, **tensors})
    assert answer.error.startswith("Error generating stream: ")
    assert reason in answer.error
    wait_for_line(official, f"[vllm] {answer.error}")


def test_an_empty_prompt_is_left_to_vllm(official: TritonServer) -> None:
    """Which takes it where the tokenizer puts a token before every text, as this model's does not."""
    error = ask(official, "", GREEDY).error
    assert error.startswith("Error generating stream: ")
    assert "prompt cannot be empty" in error


def test_parameters_may_be_the_requests(official: TritonServer) -> None:
    """Instead of the tensor; they are what its HTTP clients send."""
    by_tensor = ask(official, PROMPT, {**GREEDY, "max_tokens": 3}, stream=True).text
    assert ask(official, PROMPT, stream=True, options={"parameters": {**GREEDY, "max_tokens": 3}}).text == by_tensor
    asked = {
        "text_input": PROMPT,
        "parameters": {"stream": False, "temperature": 0, "max_tokens": 3, "exclude_input_in_output": True},
    }
    status, answer = generate(official.http_url, asked)
    assert (status, answer["text_output"]) == (200, by_tensor)


def test_adapters_are_chosen_by_name_over_http(official: TritonServer) -> None:
    """By `sampling_parameters` in the body."""
    texts = set()
    for name in ({}, {"lora_name": "doll"}, {"lora_name": "sheep"}):
        asked = {"text_input": PROMPT, "sampling_parameters": json.dumps({**GREEDY, **name}), "exclude_input_in_output": True}
        status, answer = generate(official.http_url, asked)
        assert status == 200
        texts.add(answer["text_output"])
    assert len(texts) == 3


def test_wrong_names_are_the_servers_errors(official: TritonServer) -> None:
    """An input that the model has not, and a model that is not there."""
    assert "unexpected inference input 'unknown'" in ask(official, PROMPT, GREEDY, unknown="x").error
    assert "unknown model" in ask(official, PROMPT, GREEDY, options={"model": "wrong"}).error


def test_adapters_are_chosen_by_name(official: TritonServer) -> None:
    """Each answers in its own way, and so does the model without them."""
    names: tuple[dict[str, str], ...] = ({}, {"lora_name": "doll"}, {"lora_name": "sheep"})
    assert len({ask(official, PROMPT, {**GREEDY, **name}, exclude_input_in_output=True).text for name in names}) == 3


def test_an_unknown_adapter_is_answered_with_the_names_of_the_others(official: TritonServer) -> None:
    """Its text, whole; the words that stand before other errors are not in it."""
    error = ask(official, PROMPT, {**GREEDY, "lora_name": "bactrian"}).error
    assert error == "LoRA bactrian is not supported, we currently support ['doll', 'sheep']"
    wait_for_line(official, "[vllm] LoRA bactrian not found.")


@pytest.fixture
def paused_engine(official: TritonServer) -> Iterator[None]:
    """Let the engine stand still, so that no request comes to an end."""
    (engine,) = engines(official)
    engine.suspend()
    yield
    engine.resume()


@pytest.mark.usefixtures("paused_engine")
def test_cancelled_requests_are_logged_in_its_words(official: TritonServer) -> None:
    """A hundred requests on a stream that is given up: the client is told once, the log says two things of each."""
    results: list[tuple[Any, Any]] = []
    with grpcclient.InferenceServerClient(official.grpc_url) as client:
        client.start_stream(lambda result, error: results.append((result, error)))
        for number in range(100):
            request = prompt(STRANGE[number % 4], GREEDY, stream=number == 0)
            client.async_stream_infer("vllm", [tensor(*item) for item in request.items()], request_id=str(number))
        # Triton reads a stream in order, so after the last request's refusal the model has all of them.
        wrong = prompt(PROMPT, {**GREEDY, "lora_name": "bactrian"})
        client.async_stream_infer("vllm", [tensor(*item) for item in wrong.items()])
        wait_for(lambda: results, "the last request's refusal")
        client.stop_stream(cancel_requests=True)
    refused, cancelled = [error for _, error in results]
    assert "bactrian" in refused.message()
    assert cancelled.status() == "StatusCode.CANCELLED"

    def lines(text: str) -> int:
        return official.log.read_text(errors="replace").count(text)

    wait_for(lambda: lines(CANCELLED) == 100, lambda: f"100 cancelled requests in the log, which has {lines(CANCELLED)}")
    assert lines(CANCELLING) == 100
    assert CANCELLING == "[vllm] Cancelling the request"
    assert CANCELLED == "[vllm] Successfully cancelled the request"


def test_a_dead_engine_unloads_the_model(official: TritonServer) -> None:
    """The health check: the request that finds the engine dead is told so, and after it there is no model."""
    assert is_ready(official.grpc_url)
    assert ask(official, PROMPT, GREEDY, stream=True).text == ANSWER
    for process in engines(official):
        process.kill()
    errors = set()

    def is_gone() -> bool:
        errors.add(ask(official, PROMPT, GREEDY, stream=True).error)
        return UNKNOWN in errors

    wait_for(is_gone, "the model's end")
    assert errors - {""} == {DEAD, UNKNOWN}
    assert not is_ready(official.grpc_url)
    wait_for_line(official, "[vllm] Engine is not healthy and model will be unloaded")
    assert "raw prompt" not in official.log.read_text(errors="replace").lower()  # vLLM warns of those in each log
