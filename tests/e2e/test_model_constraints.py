"""Structured outputs that cost minutes to compile: refused within seconds, and nobody else waits for them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.model_requests import ask, ask_all, prompt
from support.serving import is_cuda
from support.triton_client import stream, text_of
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from support.serving import Parts
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, WORDS = FACTS[2]
PARAMETERS = Path(__file__).parents[2] / "docs" / "parameters.md"
GOOD = prompt(PROMPT, {"temperature": 0, "max_tokens": 64}, exclude_input_in_output=True)
# all within the limits of size; vLLM 0.32 took from four seconds of a processor to more than a minute for each
COSTLY: dict[str, dict[str, Any]] = {
    "optional characters": {"regex": ".?" * 4900},
    "a few optional characters": {"regex": ".?" * 512},
    "a pattern in a schema": {"json": {"type": "string", "pattern": "^[a-z]{0,9000}$"}},
    "empty rules": {"grammar": "root ::= " + "x " * 15_000 + '\nx ::= "a" | ""'},
    "rules of rules": {"grammar": "\n".join(f'{"root" if i == 0 else f"r{i}"} ::= r{i + 1} r{i + 1} | "a"' for i in range(2000))},
}
COSTLY["rules of rules"]["grammar"] += '\nr2000 ::= "a"'


# each token of an answer takes longer than the one before, for all requests
AMBIGUOUS: dict[str, dict[str, Any]] = {
    "two ways for each character": {"grammar": 'root ::= a\na ::= [0-9a-z ] a | [0-9a-z ] a b | ""\nb ::= [0-9a-z ] b | ""'},
    "any cut": {"grammar": "root ::= root root | [0-9a-z ]+"},
    "loops of loops": {"regex": "(([a-z ]*[0-9]*)*)*"},
}


@pytest.fixture(scope="module")
def structured(server: TritonServer) -> TritonServer:
    """The shared server, which has compiled a constraint."""
    assert ask(server, PROMPT, constrained({"regex": "[0-9]{3}"})).error == ""
    return server


def constrained(fields: dict[str, Any]) -> dict[str, Any]:
    """Return sampling parameters."""
    return {"structured_outputs": fields, "max_tokens": 8, "temperature": 0}


def test_the_process_that_tries_constraints_is_as_large_as_documented(structured: TritonServer, parts: Parts) -> None:
    """docs/parameters.md has a figure for each kind of build: an operator counts it for each instance."""
    page = " ".join(PARAMETERS.read_text("utf-8").split())
    ((on_cpu, on_cuda),) = re.findall(r"takes (\d+) MB \(CPU build\) or (\d+) MB \(CUDA build\)", page)
    documented = on_cuda if is_cuda(parts.environment) else on_cpu
    (worker,) = [one for one in structured.members() if any(part.endswith("trial_process.py") for part in one.cmdline())]
    assert worker.memory_info().rss / 1e6 == pytest.approx(float(documented), rel=0.25)


@pytest.mark.parametrize("name", COSTLY)
def test_what_costs_too_much_is_refused(structured: TritonServer, name: str) -> None:
    """With its field and the limit; a neighbour's answer does not change."""
    responses = stream(structured.grpc_url, [prompt(PROMPT, constrained(COSTLY[name])), GOOD])
    (field,) = COSTLY[name]
    (error,) = [response.error for response in responses if response.error]
    assert f"structured_outputs.{field} takes more than 2 s or 512 MB to compile" in error
    assert text_of(responses, 1) == WORDS


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_makes_each_token_dear_is_refused(structured: TritonServer, name: str) -> None:
    """Compiling it takes no time."""
    (field,) = AMBIGUOUS[name]
    error = ask(structured, PROMPT, constrained(AMBIGUOUS[name])).error
    assert re.match(f"structured_outputs.{field} takes (too long for each token|more than 2 s)", error)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("regex", r"\p{L}+", "is refused by xgrammar: Regex parsing error at position 1: Unicode character class"),
        (
            "json",
            {"type": "string", "pattern": r"^\p{Lu}$"},
            "is refused by xgrammar: Regex parsing error at position 2: Unicode",
        ),
        ("json", {"$ref": "#"}, ""),  # xgrammar 0.2.8 allows no token, 0.2.9 refuses it
        ("grammar", "root ::= root", "allows no token after 0 tokens of an answer"),
        ("grammar", 'root ::= "a" x\nx ::= x', "allows no token after 1 tokens of an answer"),
        ("grammar", "start: start", "allows no token after 0 tokens of an answer"),
        ("grammar", "root ::= (", "is refused by xgrammar: EBNF parser error at line 1"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(structured: TritonServer, field: str, value: object, says: str) -> None:
    """Most in xgrammar's words; the log has one line, and no traceback."""
    before = structured.log.read_text(errors="replace")
    error = ask(structured, PROMPT, constrained({field: value})).error
    assert error.startswith(f"structured_outputs.{field} {says}")
    added = structured.log.read_text(errors="replace").removeprefix(before)
    assert len(added.splitlines()) == 1
    assert f"[vllm] {error}" in added
    assert ask(structured, PROMPT, constrained({"regex": "[0-9]{3}"})).error == ""


def test_others_are_answered_first(structured: TritonServer) -> None:
    """One that costs too much is overtaken by requests that come after it, with a constraint of their own or without."""
    requests = [prompt(PROMPT, constrained(COSTLY["empty rules"])), GOOD, prompt(PROMPT, constrained({"regex": "[a-f]{1,7}"}))]
    ended = [
        response.error or response.request_id
        for response in stream(structured.grpc_url, requests)
        if response.final or response.error
    ]
    assert sorted(ended[:2]) == ["1", "2"]
    assert "structured_outputs.grammar takes more" in ended[2]


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 200}}, "required": ["name"]}},
        {"regex": r"(\+\d{1,3} )?\d{3}-\d{4}"},
        {"grammar": 'root ::= ("yes" | "no") [.!]'},
        {"grammar": 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"'},
        {"json": {"type": "array", "items": {"type": "string"}, "minItems": 2}},
        {"regex": r"[a-z ]{1,100}"},
        {"regex": ".*"},
        {"structural_tag": json.dumps({"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]})},
    ],
)
def test_ordinary_ones_are_answered(structured: TritonServer, fields: dict[str, Any]) -> None:
    """Every kind, at the first time and again."""
    request = prompt(PROMPT, constrained(fields), exclude_input_in_output=True)
    first, again = ask_all(structured, [request]), ask_all(structured, [request])
    assert [a.error for a in (*first, *again)] == ["", ""]
    assert first[0].text == again[0].text
