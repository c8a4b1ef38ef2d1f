"""Input tensors become requests by the official backend's rules, and bad ones are refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest

from triton_vllm.base.dialect import OFFICIAL
from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.request.generate import GenerateRequest
from triton_vllm.request.parse import parse


def asked(*given, **options) -> GenerateRequest:
    """Parse what asks for an answer."""
    request = parse(*given, **options)
    assert isinstance(request, GenerateRequest)
    return request


def tensors(**values):
    """Tensors as Triton's stub hands them over: strings as object arrays of bytes."""
    made = {}
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        strings = isinstance(items[0], str) if items else False
        made[name] = np.array([i.encode() for i in items], dtype=object) if strings else np.array(items)
    return made


@pytest.mark.parametrize(
    ("given", "echo"),
    [
        ({"stream": True}, False),
        ({"stream": False}, True),
        ({"stream": True, "exclude_input_in_output": True}, False),
        ({"exclude_input_in_output": True}, False),
        ({"exclude_input_in_output": False}, True),
    ],
)
def test_echo_rules(given, echo):
    """Streaming never echoes by itself; a whole answer does unless excluded."""
    assert asked(tensors(text_input="hi", **given), "").echo is echo


def test_streaming_with_echo_is_refused_in_the_official_words():
    """Clients match on this text."""
    with pytest.raises(InvalidRequestError) as caught:
        parse(tensors(text_input="hi", stream=True, exclude_input_in_output=False), "")
    assert str(caught.value) == "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."


def test_an_empty_prompt_may_be_left_to_vllm():
    """As the official backend does; otherwise it is a client's mistake."""
    assert asked(tensors(text_input=""), "", dialect=OFFICIAL).prompt.text == ""
    with pytest.raises(InvalidRequestError, match="text_input is empty"):
        parse(tensors(text_input=""), "")


def test_reserved_names_and_headers_are_no_sampling_parameters():
    """Triton's own parameters and forwarded HTTP headers do not reach vLLM, priority and timeout get their place."""
    given = {"sequence_id": 1, "triton_x": 1, "X-Request-Id": "a", "Authorization": "b", "priority": "2", "timeout": 5}
    request = asked(tensors(text_input="hi"), json.dumps({**given, "n": 1, "lora_name": "a"}))
    assert request.parameters == {"n": 1}
    assert (request.priority, request.timeout, request.lora_name) == (2, 5, "a")


def test_the_generate_endpoints_own_id_is_no_sampling_parameter():
    """Triton passes it on beside them; in the tensor it is a client's mistake."""
    assert asked(tensors(text_input="hi"), '{"id": "42", "n": 3}').parameters == {"n": 3}
    assert asked(tensors(text_input="hi", sampling_parameters='{"id": "42"}'), "").parameters == {"id": "42"}


def test_a_misspelt_parameter_of_the_tensor_is_kept_for_refusal():
    """Only request parameters can be headers; what a client wrote into the tensor must not vanish silently."""
    assert asked(tensors(text_input="hi", sampling_parameters='{"Temperature": 1}'), "").parameters == {"Temperature": 1}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"best_of": 1}, {}),
        ({"logprobs": False}, {}),
        ({"best_of": 2}, {"best_of": 2}),
        ({"best_of": True, "logprobs": 0}, {"best_of": True, "logprobs": 0}),
        ({"logprobs": True}, {"logprobs": True}),
    ],
)
def test_what_earlier_frontends_send_with_every_request_asks_for_nothing(given, kept):
    """Other values do, and are kept to be taken or refused by name."""
    request = parse(tensors(text_input="hi", sampling_parameters=json.dumps(given)), "")
    assert isinstance(request, GenerateRequest)
    assert request.parameters == kept
    assert [type(value) for value in request.parameters.values()] == [type(value) for value in kept.values()]


def test_tritons_timeout_is_used_where_no_other_is_given():
    """Triton keeps its timeout parameter apart from the others."""
    assert asked(tensors(text_input="hi"), "", 7).timeout == 7
    assert asked(tensors(text_input="hi", timeout=9), "", 7).timeout == 9


@pytest.mark.parametrize(
    ("given", "parameters", "says"),
    [
        (
            {"messages": '[{"role": "user", "content": "x"}]', "chat_template_kwargs": '{"chat_template": "{{ 1 }}"}'},
            "",
            "chat_template_kwargs cannot hold a chat_template",
        ),
        ({"text_input": ["a", "b"]}, "", "text_input must have one element, not 2"),
        ({"text_input": "a", "stream": "perhaps"}, "", "stream must be true or false"),
        ({"text_input": "a"}, '{"priority": true}', "priority must be an integer"),
        ({"messages": "{}"}, "", "messages must be a non-empty JSON list"),
        ({"messages": '[{"role": "user"}]', "tools": "{}"}, "", "tools must be a JSON list"),
        ({"messages": '[{"role": "user"}]', "image": "YQ=="}, "", "with messages, media go into their content"),
        ({"embedding_request": '{"input": "a", "pooling_params": 1}'}, "", "pooling_params must be an object"),
    ],
)
def test_bad_requests_are_refused_by_name(given, parameters, says):
    """The message names the input and the reason."""
    with pytest.raises(InvalidRequestError) as caught:
        parse(tensors(**given), parameters)
    assert says in str(caught.value)


def test_bytes_that_are_no_text_are_refused():
    """A prompt that is not UTF-8 is the client's mistake, not a crash."""
    with pytest.raises(InvalidRequestError, match="text_input must be UTF-8"):
        parse({"text_input": np.array([b"\xff"], dtype=object)}, "")
