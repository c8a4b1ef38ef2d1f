"""What the adapter uses of vLLM is found by name; tests/contract looks for the names in real versions."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from triton_vllm import vllm_api
from triton_vllm.vllm_api import names

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_name_that_is_not_found_is_an_error_only_if_it_is_required():
    """The error names the places and the supported versions."""
    assert names._find("gone", ("json",), required=False) is None
    with pytest.raises(ImportError, match=r"no gone in json or pickle; vLLM 0\.11 to"):
        names._find("gone", ("json", "pickle"))


@dataclasses.dataclass
class Arguments:
    """In place of vLLM's, with an annotation that only type checkers can resolve."""

    model: str
    sizes: list[int] = dataclasses.field(default_factory=list)
    strange: SomethingElse = None  # type: ignore[name-defined]  # noqa: F821 - that is the point


def test_declared_types_are_resolved_and_those_that_cannot_be_are_not_checked():
    """Annotations are strings in most of vLLM's modules."""
    vllm: Any = SimpleNamespace(AsyncEngineArgs=Arguments)
    types = vllm_api.engine_arg_types(vllm)
    assert types == {"model": str, "sizes": list[int], "strange": Any}


class Collector:
    """In place of vLLM's RequestOutputCollector."""

    put: Callable[[Any], None]  # set by what is attached to it

    def __init__(self, early):
        self.early = early

    def get_nowait(self):
        if isinstance(self.early, Exception):
            raise self.early
        return self.early


@pytest.mark.parametrize("early", [None, "an output", ValueError("refused")])
def test_what_came_before_attaching_comes_first(early):
    """An output or an exception that vLLM has put already is neither lost nor overtaken."""
    got: list[Any] = []
    collector = Collector(early)
    vllm_api.attach(collector, got.append)
    collector.put("later")
    assert got == ([early] if early else []) + ["later"]


ONE, BOTH = ["r-1"], ["0_r-1", "1_r-1"]
STATES = [
    ((1, ONE, {"r-1": True}), False),
    ((2, BOTH, {"0_r-1": True, "1_r-1": False}), True),
    ((2, BOTH[1:], {"1_r-1": True}), True),  # the other completion has finished
    ((1, ONE, {"other": True}), None),  # it has finished, and its output is on the way, or has an id that we cannot find
    ((1, ONE, {"r-1": None}), None),  # no such attribute
]


@pytest.mark.parametrize(("state", "expected"), STATES)
@pytest.mark.parametrize("own_ids", [True, False])
def test_a_request_has_begun_when_a_completion_has_a_token(state, expected, own_ids):
    """vLLM 0.14 has ids of its own for requests, 0.11 only for the completions of one that has several."""
    count, ids, prefilling = state
    states = {i: SimpleNamespace() if flag is None else SimpleNamespace(is_prefilling=flag) for i, flag in prefilling.items()}
    processor = SimpleNamespace(request_states=states, parent_requests={})
    request_id = "r" if own_ids or count > 1 else "r-1"
    if own_ids:
        processor.external_req_ids = defaultdict(list, {request_id: ids})
    elif count > 1:
        processor.parent_requests = {request_id: SimpleNamespace(child_requests=set(ids))}
    assert vllm_api.has_begun(SimpleNamespace(output_processor=processor), request_id, count) is expected


@pytest.mark.parametrize(
    ("said", "passed_on"),
    [
        (
            "Audio exceeds maximum allowed duration of 6s (7.0s). Set VLLM_MAX_AUDIO_DECODE_DURATION_S to increase this limit.",
            "Audio exceeds maximum allowed duration of 6s (7.0s)",
        ),
        (
            "Audio decode exceeded 256 MiB memory limit (257 MiB). Set VLLM_MAX_AUDIO_DECODE_BYTES to increase this limit.",
            "Audio decode exceeded 256 MiB memory limit (257 MiB)",
        ),
        (
            "Maximum file size exceeded (parameter=audio_filesize_mb, value=26.5)",
            "Maximum file size exceeded (parameter=audio_filesize_mb, value=26.5)",
        ),
        ("Invalid or corrupted audio data.", None),
        ("Set VLLM_X to increase this limit. Then /internal/path", None),
    ],
)
def test_vllms_words_for_too_large_a_file_lose_its_advice(said, passed_on):
    """The texts are those of vLLM 0.28 and 0.32; any other may hold internals."""
    assert vllm_api.too_large(ValueError(said)) == passed_on


@pytest.mark.parametrize(
    ("source", "override", "most"),
    [
        ("auto", {}, None),
        ("auto", {"max_new_tokens": 7}, 7),
        ("vllm", {"max_new_tokens": 7}, 7),
        ("/folder", {}, 9),
    ],
)
def test_a_chats_defaults_are_those_of_vllms_server(source, override, most):
    """The sampling parameters are what vLLM makes of both; the most tokens of any answer those that the operator has chosen."""
    config = SimpleNamespace(generation_config=source, override_generation_config=override, max_model_len=64)
    config.get_diff_sampling_param = lambda: {"max_tokens": 9, "top_k": 3}
    config.is_multimodal_model, config.get_vocab_size = False, lambda: 9
    scheduler = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=7))
    found = vllm_api.facts(SimpleNamespace(model_config=config, vllm_config=scheduler), ("generate",))
    assert found.seats == 7
    assert found.chat == vllm_api.ChatDefaults({"max_tokens": 9, "top_k": 3}, most, 64)
