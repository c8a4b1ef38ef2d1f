"""What Triton is told and asked is what the model meant; Triton's module is replaced by a stand-in."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.fake_log import FakeLog
from support.fake_reply import fake_reply
from support.fake_triton import FINAL, REFUSAL, MetricFamily, Request
from triton_vllm.base import errors
from triton_vllm.base import triton as module
from triton_vllm.base.dialect import OFFICIAL, OURS
from triton_vllm.base.refusals import Refusals

APART: Any = {"errors_apart": True, "refusals": Refusals()}
NOT_APART: Any = {"errors_apart": False, "refusals": Refusals()}


def at_once(end, pause):
    end()


def text(value):
    return np.array([value], np.object_)


def test_parameters_that_are_no_text_are_the_clients_mistake(triton, monkeypatch):
    """Over HTTP a body need not be UTF-8, and Triton's stub decodes the parameters when they are asked for."""
    request = Request({}, '{"n": 1}')
    assert module.parameters(request) == '{"n": 1}'
    monkeypatch.setattr(request, "parameters", b'{"stop": "\xff"}'.decode)
    with pytest.raises(errors.InvalidRequestError, match="the request parameters must be UTF-8 text"):
        module.parameters(request)


ANSWER = [("text_output", text(b"a")), ("token_ids", np.zeros(1000, np.int32))]


@pytest.mark.parametrize("final", [False, True])
def test_the_final_flag_goes_alone(triton, final):
    """Together with data, a client that leaves at the flag keeps the model from being unloaded (test_stream_ends.py)."""
    request = Request({})
    module.Channel(request, OURS, FakeLog(), at_once, **APART).send(ANSWER, final=final)
    (response, flags), *end = request.sender.sent
    assert flags == 0
    assert [(t.name(), t.as_numpy()[0]) for t in response.output_tensors] == [("text_output", b"a"), ("token_ids", 0)]
    assert [(one.output_tensors, one.error, flags) for one, flags in end] == [((), None, FINAL)] * final


ENDS = [
    (0.1, lambda channel: channel.send(ANSWER, final=True), module.SHORTEST_S),
    (60.0, lambda channel: channel.send(ANSWER, final=True), module.LONGEST_S),
    (0.1, lambda channel: channel.send(ANSWER, final=True, whole=True), 0.1 * module.SHARE),
    (60.0, lambda channel: channel.send(ANSWER, final=True, whole=True), module.LONGEST_S),
    (0.1, lambda channel: channel.send_error(errors.InvalidRequestError("x")), module.LONGEST_S),
]


@pytest.mark.parametrize(("took", "send", "expected"), ENDS)
def test_the_final_flag_goes_after_a_pause(triton, monkeypatch, took, send, expected):
    """A client that leaves at the last response is gone then. A whole answer, which may wait for the flag, is not slowed down."""
    request, ends, now = Request({}), [], 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    channel = module.Channel(request, OURS, FakeLog(), lambda *end: ends.append(end), **APART)
    now += took
    send(channel)
    ((end, pause),) = ends
    assert pause == pytest.approx(expected)
    assert [flags for _, flags in request.sender.sent] == [0]
    end()
    assert [flags for _, flags in request.sender.sent] == [0, FINAL]


@pytest.mark.parametrize(("took", "expected"), [(0.0, module.LONGEST_S), (0.005, module.LONGEST_S - 0.005), (1.0, 0.0)])
def test_an_older_server_gets_an_error_with_its_flag_not_at_once(triton, monkeypatch, took, expected):
    """Apart, or while the server still handles the request, either ends it (test_model_errors.py)."""
    request, ends, now = Request({}), [], 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    channel = module.Channel(request, OURS, FakeLog(), lambda *end: ends.append(end), **NOT_APART)
    now += took
    channel.send_error(errors.InvalidRequestError("x"))
    assert request.sender.sent == []
    ((end, pause),) = ends
    assert pause == pytest.approx(expected)
    end()
    assert [(response.error.message, flags) for response, flags in request.sender.sent] == [("x", FINAL)]


def test_an_older_server_without_memory_gets_an_error_and_then_its_flag(triton, monkeypatch):
    """A sender closes before it places a final response: if that does not fit, a client waits for ever."""
    request = Request({})
    monkeypatch.setattr(module, "shared_memory_free", lambda: 0)
    module.Channel(request, OURS, FakeLog(), at_once, **NOT_APART).send_error(errors.InvalidRequestError("x"))
    sent = [(response.error and response.error.message, flags) for response, flags in request.sender.sent]
    assert sent == [("x", 0), (None, FINAL)]


def test_the_last_response_keeps_its_memory_until_the_flag_is_sent(triton, monkeypatch):
    """A flag that finds no room in shared memory cannot be sent again."""
    request, ends, held = Request({}), [], []
    monkeypatch.setattr(request.sender, "send", lambda response=None, flags=0: response and held.append(weakref.ref(response)))
    module.Channel(request, OURS, FakeLog(), lambda end, _: ends.append(end), **APART).send(ANSWER, final=True)
    assert held[0]() is not None
    ends[0]()
    assert held[0]() is None


def error_of(request):
    """Return the text and code of the one error that was sent; the end follows it, alone."""
    (response, flags), (end, last) = request.sender.sent
    assert (flags, end.error, end.output_tensors, last) == (0, None, (), FINAL)
    return response.error.message, response.error.code


def test_an_error_that_does_not_fit_ends_the_request(triton, monkeypatch):
    """Its client would wait for ever otherwise."""
    request = Request({})
    send = request.sender.send

    def full(response=None, flags=0):
        if response is not None:
            raise RuntimeError("Failed to increase the shared memory pool size")
        send(response, flags)

    monkeypatch.setattr(request.sender, "send", full)
    fake_reply(module.Channel(request, OURS, FakeLog(), at_once, errors_apart=True, refusals=Refusals())).give_up()
    assert [flags for _, flags in request.sender.sent] == [FINAL]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequestError("x"), "INVALID_ARG"),
        (errors.UnsupportedError("x"), "UNSUPPORTED"),
        (errors.UnavailableError("x"), "UNAVAILABLE"),
        (errors.CancelledError("x"), "CANCELLED"),
        (errors.InternalError("x"), "INTERNAL"),
    ],
)
def test_an_error_is_final_and_has_its_code(triton, error, code):
    """Clients tell from the code whether to try again. It is counted, but not if the client gave the request up."""
    request, refusals = Request({}), Refusals()
    module.Channel(request, OURS, FakeLog(), at_once, errors_apart=True, refusals=refusals).send_error(error)
    assert error_of(request) == ("x", code)
    counted = {name for name, count in refusals.counts().items() if count == 1}
    assert counted == {code} - {"CANCELLED"}


class Lines:
    """A log; one that is `full` takes nothing."""

    def __init__(self, *, full=False):
        self.full = full
        self.lines = []

    def _take(self, line):
        if self.full:
            raise RuntimeError("No free memory")
        self.lines.append(line)

    def info(self, text):
        self._take(("info", text))

    def error(self, text):
        self._take(("error", text))

    def warning(self, text):
        self._take(("warning", text))


@pytest.mark.parametrize(
    ("error", "answer", "code", "line"),
    [
        (
            errors.InvalidRequestError("x"),
            "Error generating stream: x",
            "INTERNAL",
            ("error", "[vllm] Error generating stream: x"),
        ),
        (
            errors.InvalidRequestError("LoRA a is not supported, we currently support ['b']"),
            "LoRA a is not supported, we currently support ['b']",
            "INTERNAL",
            ("info", "[vllm] LoRA a not found."),
        ),
        (
            errors.InvalidRequestError("LoRA feature is not enabled."),
            "LoRA feature is not enabled.",
            "INTERNAL",
            ("info", "[vllm] LoRA is not enabled, please restart the backend with LoRA enabled."),
        ),
        (errors.CancelledError("Request was cancelled"), "Request was cancelled", "CANCELLED", None),
    ],
)
def test_an_error_may_be_that_of_the_official_backend(triton, error, answer, code, line):
    """Words, code and log; a log that cannot be written takes no answer away."""
    for log in (Lines(), Lines(full=True)):
        request = Request({})
        module.Channel(request, OFFICIAL, log, at_once, **APART).send_error(error)
        assert error_of(request) == (answer, code)
        assert log.lines == ([line] if line and not log.full else [])


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        (REFUSAL, False),
        ("Model mine - Error when running inference: Server not ready", True),
        ("Failed for execute the inference request. Model 'mine' is not ready.", False),
        (None, False),
    ],
)
def test_a_server_that_ends_says_so(triton, monkeypatch, answer, ends):
    """It answers nothing about its models any more; a model that is not ready is no server that ends."""
    monkeypatch.setattr(triton, "refusal", answer)
    assert module.is_ending("mine") is ends


def test_a_server_that_may_not_be_asked_does_not_end(triton, monkeypatch):
    """That is so while the model is being unloaded."""
    monkeypatch.setattr(triton, "trouble", triton.TritonModelException("BLS is only supported during the 'execute' function."))
    assert module.is_ending("mine") is False


def test_nothing_is_asked_where_shared_memory_is_short(triton, monkeypatch):
    """A question that finds no room there crashes the stub."""
    monkeypatch.setattr(triton, "trouble", AssertionError("the stub crashes here"))
    monkeypatch.setattr(module, "shared_memory_free", lambda: module.MARGIN_BYTES)
    assert module.is_ending("mine") is False


def test_samples_of_one_name_share_a_family(triton):
    """Triton refuses a second family of the same name."""
    metrics: Any = module.TritonMetrics()
    first, second = (metrics.create("vllm:n_total", "how many", {"le": le}, counter=True) for le in "ab")
    metrics.add(first, 0.5)
    metrics.add(first, 1.5)
    (family,) = metrics._families.values()
    assert family.metrics == [first, second]
    assert (family.kind, family.description) == (MetricFamily.COUNTER, "how many")
    assert (first.value, second.value, first.labels) == (2.0, 0.0, {"le": "a"})
