"""The declared tensors are the official backend's and ours."""

from __future__ import annotations

from typing import Any

import pytest

from triton_vllm.base.errors import ConfigError
from triton_vllm.request import contract

OFFICIAL_INPUTS = {
    "text_input", "image", "stream", "sampling_parameters", "exclude_input_in_output", "return_finish_reason",
    "return_cumulative_logprob", "return_logprobs", "return_num_input_tokens", "return_num_output_tokens",
    "embedding_request",
}  # fmt: skip
OFFICIAL_OUTPUTS = {
    "text_output",
    "finish_reason",
    "cumulative_logprob",
    "logprobs",
    "num_input_tokens",
    "num_output_tokens",
}


def test_the_official_backends_tensors_are_all_there():
    """Its clients work unchanged."""
    assert OFFICIAL_INPUTS.issubset(t.name for t in contract.INPUTS)
    assert OFFICIAL_OUTPUTS.issubset(t.name for t in contract.OUTPUTS)


class Config:
    """Triton's ModelConfig, as far as completion uses it."""

    def __init__(self, inputs, size=0):
        self.size = size
        self.input = [{"name": n} for n in inputs]
        self.output = []
        self.policy = None

    def as_dict(self):
        return {"input": self.input, "output": self.output, "max_batch_size": self.size}

    def add_input(self, tensor):
        self.input.append(tensor)

    def add_output(self, tensor):
        self.output.append(tensor)

    def set_model_transaction_policy(self, policy):
        self.policy = policy

    def set_max_batch_size(self, size):
        assert size == 0


def test_a_minimal_config_is_completed():
    """A config.pbtxt that names the backend only gets every tensor once and the decoupled policy."""
    config: Any = contract.complete(Config(["text_input"]))
    assert sorted(t["name"] for t in config.input) == sorted(t.name for t in contract.INPUTS)
    assert sorted(t["name"] for t in config.output) == sorted(t.name for t in contract.OUTPUTS)
    assert config.policy == {"decoupled": True}


def test_a_server_that_does_not_complete_the_configuration_is_told_of():
    """Else each request would fail with an error about a tensor."""
    whole = {
        "input": [{"name": "text_input"}],
        "output": [{"name": "text_output"}],
        "model_transaction_policy": {"decoupled": True},
    }
    contract.require_completed(whole)
    for check in (lambda: contract.require_completed({**whole, "max_batch_size": 8}), lambda: contract.complete(Config([], 8))):
        with pytest.raises(ConfigError, match=r"^config.pbtxt: max_batch_size is 8: write max_batch_size: 0, because vLLM"):
            check()
    for field, named in (("input", "text_input"), ("output", "text_output"), ("model_transaction_policy", "decoupled")):
        with pytest.raises(ConfigError, match=f"{named}.*start tritonserver without --disable-auto-complete-config"):
            contract.require_completed({**whole, field: None})
