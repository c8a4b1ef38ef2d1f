"""What Triton is told and asked is what the model meant; Triton's module is replaced by a stand-in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.fake_log import FakeLog
from support.fake_triton import FINAL, REFUSAL, MetricFamily, Request
from triton_vllm.answer import NOT_SENT, Reply
from triton_vllm.base import errors
from triton_vllm.base import triton as module
from triton_vllm.base.dialect import OFFICIAL, OURS


def text(value):
    return np.array([value], np.object_)


def test_inputs_come_by_name(triton):
    """A tensor is found by the name that it was sent under."""
    request = Request({"text_input": text(b"a"), "stream": np.array([True])})
    found = module.inputs(request)
    assert set(found) == {"text_input", "stream"}
    assert found["text_input"][0] == b"a"


def test_parameters_that_are_no_text_are_the_clients_mistake(triton, monkeypatch):
    """Over HTTP a body need not be UTF-8, and Triton's stub decodes the parameters when they are asked for."""
    request = Request({}, '{"n": 1}')
    assert module.parameters(request) == '{"n": 1}'
    monkeypatch.setattr(request, "parameters", b'{"stop": "\xff"}'.decode)
    with pytest.raises(errors.InvalidRequestError, match="the request parameters must be UTF-8 text"):
        module.parameters(request)


def test_the_timeout_is_tritons_own_or_none(triton):
    """Older servers' requests have no such method."""
    assert module.timeout_us(Request({}, timeout=7)) == 7
    assert module.timeout_us(object()) == 0


@pytest.mark.parametrize(("final", "flags"), [(False, 0), (True, FINAL)])
def test_a_response_carries_its_tensors_and_whether_it_is_final(triton, final, flags):
    """The final flag ends the request in the server; without it the server would wait for ever."""
    request = Request({})
    module.Channel(request, OURS, FakeLog()).send([("text_output", text(b"a"))], final=final)
    ((response, sent),) = request.sender.sent
    assert sent == flags
    assert [(t.name(), t.as_numpy()[0]) for t in response.output_tensors] == [("text_output", b"a")]
    assert response.error is None


ANSWER = [("text_output", text(b"a" * 1000)), ("token_ids", np.zeros(1000, np.int32))]


@pytest.mark.parametrize(("free", "count"), [(0, 2), (module.MARGIN + 2 * 5000, 2), (module.MARGIN + 2 * 5000 + 1, 1)])
def test_the_end_goes_out_by_itself_where_shared_memory_is_short(triton, monkeypatch, free, count):
    """One final response everywhere else: a second handshake for each request would cost."""
    monkeypatch.setattr(module, "room", module.Room(lambda: free))
    request = Request({})
    module.Channel(request, OURS, FakeLog()).send(ANSWER, final=True)
    assert [flags for _, flags in request.sender.sent] == [0, FINAL][-count:]
    assert [len(response.output_tensors) for response, _ in request.sender.sent] == [2, 0][:count]


def test_a_final_response_that_does_not_fit_ends_in_an_error(triton, monkeypatch):
    """Sent at once as the final one it would close Triton's sender, and the client would wait for ever."""
    monkeypatch.setattr(module, "room", module.Room(lambda: 0))
    request = Request({})
    request.sender.full = True
    reply = Reply(module.Channel(request, OURS, FakeLog()))
    with pytest.raises(RuntimeError, match="shared memory"):
        reply.send(ANSWER, final=True)
    reply.give_up()
    ((response, flags),) = request.sender.sent
    assert (response.error.message, flags) == (NOT_SENT, FINAL)


def test_how_much_shared_memory_is_free_is_what_the_file_system_says(triton, monkeypatch, tmp_path):
    """Where it cannot tell, none is taken to be."""
    monkeypatch.setattr(module, "SHARED_MEMORY", str(tmp_path))
    assert module.shared_memory_free() > 0
    monkeypatch.setattr(module, "SHARED_MEMORY", str(tmp_path / "none"))
    assert module.shared_memory_free() == 0


def test_where_much_is_free_it_is_not_asked_for_each_answer():
    """For a moment: what others take of a gibibyte meanwhile is less than that."""
    asked, now = [], [0.0]

    def free():
        asked.append(now[0])
        return frees.pop(0)

    room = module.Room(free, lambda: now[0])
    frees = [module.PLENTY + 1, module.PLENTY, module.MARGIN]
    for at in (0.0, 0.5 * module.MOMENT_S, module.MOMENT_S, module.MOMENT_S):
        now[0] = at
        assert room.fits(1000) is (len(asked) < 3)
    assert asked == [0.0, module.MOMENT_S, module.MOMENT_S]
    assert frees == []


def test_a_large_answer_is_not_trusted_to_a_moment_ago():
    """Its own size is what may be missing."""
    frees = [module.PLENTY + 1, module.MARGIN + 1]
    room = module.Room(lambda: frees.pop(0), lambda: 0.0)
    assert room.fits(1000)
    assert not room.fits(module.MARGIN)


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
    """Clients tell from the code whether to try again."""
    request = Request({})
    module.Channel(request, OURS, FakeLog()).send_error(error)
    ((response, flags),) = request.sender.sent
    assert (response.error.message, response.error.code, flags) == ("x", code, FINAL)


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
        module.Channel(request, OFFICIAL, log).send_error(error)
        ((response, flags),) = request.sender.sent
        assert (response.error.message, response.error.code, flags) == (answer, code, FINAL)
        assert log.lines == ([line] if line and not log.full else [])


def test_a_code_that_this_triton_lacks_is_unknown(triton):
    """CANCELLED is younger than the oldest servers."""
    strange = type("StrangeError", (errors.AdapterError,), {"code": "NEWER"})
    request = Request({})
    module.Channel(request, OURS, FakeLog()).send_error(strange("x"))
    assert request.sender.sent[0][0].error.code == "UNKNOWN"


def test_the_server_is_asked_about_the_request(triton):
    """Its answer is passed on."""
    request = Request({})
    channel = module.Channel(request, OURS, FakeLog())
    assert channel.is_cancelled() is False
    request.sender.cancelled = True
    assert channel.is_cancelled() is True


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
    monkeypatch.setattr(module, "room", module.Room(lambda: 0))
    assert module.is_ending("mine") is False


def test_samples_of_one_name_share_a_family(triton):
    """Triton refuses a second family of the same name."""
    metrics: Any = module.TritonMetrics()
    first, second = (metrics.create("vllm:n_total", "how many", {"le": le}, counter=True) for le in "ab")
    metrics.add(first, 2.0)
    (family,) = metrics._families.values()
    assert family.metrics == [first, second]
    assert (family.kind, family.description) == (MetricFamily.COUNTER, "how many")
    assert (first.value, second.value, first.labels) == (2.0, 0.0, {"le": "a"})


def test_a_gauge_is_set_and_cleared_metrics_are_dropped(triton):
    """The server shows a metric for as long as its family is held."""
    metrics: Any = module.TritonMetrics()
    gauge = metrics.create("vllm:running", "running", {}, counter=False)
    metrics.set(gauge, 3.0)
    (family,) = metrics._families.values()
    assert (family.kind, family.description, gauge.value) == (MetricFamily.GAUGE, "running", 3.0)
    metrics.clear()
    assert metrics._families == {}


def test_the_log_names_the_model(triton):
    """Several models share a server's log."""
    log = module.Log("mine")
    log.info("a")
    log.warning("b")
    log.error("c")
    assert triton.Logger.lines == [("info", "[mine] a"), ("warning", "[mine] b"), ("error", "[mine] c")]
