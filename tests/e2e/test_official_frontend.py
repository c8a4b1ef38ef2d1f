"""What Triton's OpenAI frontend sends is answered in the way that it reads answers; `openai_frontend.json` has the requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.model_requests import Answer
from support.repositories import serves_since
from support.triton_client import stream
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
RECORDED = json.loads(Path(__file__).with_name("openai_frontend.json").read_text(encoding="utf-8"))
GENERATE, EMBED = RECORDED["generate"], RECORDED["embed"]
PROMPT, ANSWER = FACTS[2]
COUNTS = {"num_input_tokens", "num_output_tokens"}
FORCED = [name for name in GENERATE if name.startswith("forced")]


def as_sent(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return a request's tensors: JSON text, and within `sampling_parameters` once more."""
    made = dict(recorded)
    if "sampling_parameters" in made:
        values = made["sampling_parameters"]
        made["sampling_parameters"] = json.dumps({k: json.dumps(v) if isinstance(v, dict) else v for k, v in values.items()})
    if "embedding_request" in made:
        made["embedding_request"] = json.dumps(made["embedding_request"])
    return made


def answer_to(server: TritonServer, recorded: dict[str, Any]) -> Answer:
    """Send a recorded request; check what the frontend requires of every answer: one string, two counts, one that is final."""
    found = stream(server.grpc_url, [as_sent(recorded)])
    ends = [response.final or bool(response.error and not serves_since("26.04")) for response in found]
    assert ends == [False] * (len(found) - 1) + [True]
    answer = Answer(tuple(r for r in found if r.tensors or r.error))
    if answer.error:
        return answer
    assert len(found) <= 2 or recorded.get("stream")
    for response in answer.responses:
        assert response.tensors.keys() >= {"text_output", *COUNTS}
        assert all(response.tensors[name].size == 1 for name in ("text_output", *COUNTS))
        assert all(response.tensors[name].dtype == "uint32" for name in COUNTS)
    return answer


PLAIN = ["completion", "completion, streamed", "chat with everything", "chat with one stop string"]
EARLIER = [name for name in GENERATE if name.endswith(("frontend of 2025", "2025, streamed")) and name not in FORCED]


@pytest.mark.parametrize("name", [*PLAIN, *EARLIER])
def test_a_completion(llama_server: TritonServer, name: str) -> None:
    """The new text, and the usage that the frontend adds up from the responses."""
    answer = answer_to(llama_server, GENERATE[name])
    whole = answer_to(llama_server, GENERATE["completion"])
    assert answer.text == ANSWER
    assert answer.values("num_input_tokens")[0] == whole.values("num_input_tokens")[0]
    counts = [count for (count,) in answer.values("num_output_tokens")]
    assert [sum(counts)] == whole.values("num_output_tokens")[0]
    assert len(counts) == 1 or GENERATE[name]["stream"]


def test_what_a_completion_is_asked_to_be(llama_server: TritonServer) -> None:
    """Each parameter of the frontend's own changes the answer: where it ends, how long it is, what it may say."""
    assert answer_to(llama_server, GENERATE["chat that stops"]).text == ANSWER.split("river")[0]
    plain, longer = (answer_to(llama_server, GENERATE[name]) for name in ("completion", "chat of sixteen tokens"))
    assert plain.values("num_output_tokens")[0][0] < 16 == longer.values("num_output_tokens")[0][0]
    named = ("completion by chance", "completion by chance", "completion by another chance", "completion that may repeat nothing")
    one, again, other, new = (answer_to(llama_server, GENERATE[name]).text for name in named)
    assert one == again
    assert len({one, other, new, plain.text}) == 4
    assert answer_to(llama_server, GENERATE["completion by the likeliest only"]).text == plain.text


@pytest.mark.parametrize("name", ["completion with logprobs", "chat with everything"])
def test_logprobs(llama_server: TritonServer, name: str) -> None:
    """JSON as the frontend reads it: for each token an object of tokens, whose least rank is the chosen one's."""
    answer = answer_to(llama_server, GENERATE[name])
    ((text,),), (count,) = answer.values("logprobs"), answer.values("num_output_tokens")[0]
    positions = [sorted(position.values(), key=lambda token: token["rank"]) for position in json.loads(text)]
    most = GENERATE[name]["sampling_parameters"]["logprobs"]
    assert len(positions) == count
    assert all(most <= len(position) <= most + 1 for position in positions)
    assert "".join(position[0]["decoded_token"] for position in positions).startswith(ANSWER)


@pytest.mark.parametrize("name", FORCED)
def test_forced_tool_calls(llama_server: TritonServer, name: str) -> None:
    """The tool's arguments, whichever fields of its own vLLM's constraint the frontend sends along."""
    answer = answer_to(llama_server, GENERATE[name])
    assert answer.error == ""
    assert json.loads(answer.text) in ("Paris", "Rome")


@pytest.mark.parametrize("name", ["text", "token ids"])
def test_an_embedding(embedding_server: TritonServer, name: str) -> None:
    """A list of numbers as JSON; no token has been generated."""
    answer = answer_to(embedding_server, EMBED[name])
    assert all(isinstance(number, float) for number in json.loads(answer.text))
    assert answer.values("num_input_tokens")[0][0] > 0
    assert answer.values("num_output_tokens") == [[0]]


def test_dimensions_that_the_model_has_not_are_an_error(embedding_server: TritonServer) -> None:
    """vLLM's, as with the official backend: only a model that was trained for it has other ones."""
    assert "dimensions=32" in answer_to(embedding_server, EMBED["dimensions"]).error
