"""The declared tensors are the official backend's and ours, the same in config.pbtxt and in the completion."""

from __future__ import annotations

import re
from pathlib import Path

from triton_vllm.request import contract
from triton_vllm.request.parse import PROMPTS

CONFIG = Path(__file__).parents[4] / "model_repository" / "vllm" / "config.pbtxt"
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


def declared(kind):
    blocks = re.findall(rf"^{kind} {{\n(.*?)^}}", CONFIG.read_text(), re.MULTILINE | re.DOTALL)
    found = {}
    for block in blocks:
        name = re.search(r'name: "(\w+)"', block)
        data_type = re.search(r"data_type: (\w+)", block)
        dims = re.search(r"dims: \[(.*?)\]", block)
        assert name
        assert data_type
        assert dims
        found[name[1]] = (data_type[1], tuple(int(d) for d in dims[1].split(",")), "optional: true" in block)
    return found


def test_config_declares_the_contract():
    """config.pbtxt and the code cannot drift apart; every input is optional, since one of several prompts is required."""
    assert declared("input") == {t.name: (t.data_type, t.dims, True) for t in contract.INPUTS}
    assert declared("output") == {t.name: (t.data_type, t.dims, False) for t in contract.OUTPUTS}


def test_the_official_backends_tensors_are_all_there():
    """Its clients work unchanged."""
    assert OFFICIAL_INPUTS.issubset(t.name for t in contract.INPUTS)
    assert OFFICIAL_OUTPUTS.issubset(t.name for t in contract.OUTPUTS)


class Config:
    """Triton's ModelConfig, as far as completion uses it."""

    def __init__(self, inputs):
        self.input = [{"name": n} for n in inputs]
        self.output = []
        self.policy = None

    def as_dict(self):
        return {"input": self.input, "output": self.output}

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
    config = contract.complete(Config(["text_input"]))
    assert sorted(t["name"] for t in config.input) == sorted(t.name for t in contract.INPUTS)
    assert sorted(t["name"] for t in config.output) == sorted(t.name for t in contract.OUTPUTS)
    assert config.policy == {"decoupled": True}


def test_the_comment_names_each_input_that_makes_a_request():
    """One of them is required."""
    (line,) = re.findall(r"^# One of (.*) is required", CONFIG.read_text(), re.MULTILINE)
    assert sorted(re.findall(r"\w+_\w+|messages", line)) == sorted([*PROMPTS, "embedding_request", "operator_request"])
