"""Constraints are tried in the real worker process; xgrammar is replaced by a stand-in that costs what a constraint says."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest

from triton_vllm import vllm_api
from triton_vllm.base.errors import InvalidRequestError, UnavailableError
from triton_vllm.base.limits import Limits
from triton_vllm.constraints import trials as module
from triton_vllm.constraints.checks import Constraint, to_compile

WORKER = module.SCRIPT
XGRAMMAR = f"""
import numpy, os, runpy, sys, time
from types import SimpleNamespace


# of the processor, for a token of an answer before the 32nd one and after it
SECONDS = {{"has many ways": (0, 0.03), "is dear": (0.07, 0.07), "is slow": (0.03, 0.03)}}


class Cost:
    def __init__(self, *_, **__):
        self.stop_token_ids, self.vocab_size = [1], 30

    def __getattr__(self, name):
        def cost(text):
            stage, _, what = text.partition(" ")
            if stage not in name:
                return self
            if what == "spins":
                while True: pass
            if what == "fills the memory":
                return bytearray(1 << 31)
            if what == "aborts":
                os.abort()
            if what == "finds no memory":
                raise RuntimeError("std::bad_alloc")
            if what == "is refused":
                raise RuntimeError("[12:34:56] /project/cpp/grammar.cc:12: No \\\\p\\n here." + "x" * 1000)
            if what == "has a dead end" or what in SECONDS:
                return what
            if what == "is missing":
                raise AttributeError(text)
        return cost


class Matcher:
    def __init__(self, compiled):
        self.left = 1000 if compiled in SECONDS else 3
        self.compiled = compiled

    def fill_next_token_bitmask(self, mask, row):
        assert self.left > 0
        # the two bits that are no tokens; the token that ends the answer and another one
        tokens = 0 if self.compiled == "has a dead end" and self.left == 1 else 0b110
        mask[row][0] = -1 << 30 | tokens
        early, late = SECONDS.get(self.compiled, (0, 0))
        end = time.process_time() + (early if self.left > 968 else late)
        while time.process_time() < end: pass

    def accept_token(self, token):
        assert token == 2
        self.left -= 1
        return self.left > 0


class Row(list):
    def numpy(self):
        return numpy.array(self, numpy.int32)


sys.modules["xgrammar"] = SimpleNamespace(
    TokenizerInfo=SimpleNamespace(deserialize_json=lambda text: Cost()), Grammar=Cost(), GrammarCompiler=Cost,
    GrammarMatcher=Matcher, allocate_token_bitmask=lambda rows, size: [Row([0])],
)
runpy.run_path({str(WORKER)!r}, run_name="__main__")
"""


def engine(backend="auto"):
    config = SimpleNamespace(structured_outputs_config=SimpleNamespace(backend=backend))
    return SimpleNamespace(vllm_config=config)


@pytest.fixture
def trials(tmp_path, monkeypatch):
    """Trials whose worker has the stand-in."""
    script = tmp_path / "worker.py"
    script.write_text(XGRAMMAR, encoding="utf-8")

    async def tokenizer(_llm):
        return lambda: "{}"

    monkeypatch.setattr(module, "SCRIPT", script)
    monkeypatch.setattr(vllm_api, "xgrammar_tokenizer", tokenizer)
    return module.Trials()


def regex(text):
    return Constraint("regex", "regex", text, 1)


def tried(trials, *texts, llm=None):
    """Try constraints one after the other; return None or the error of each."""

    async def all_of_them():
        return [await outcome(trials, text, llm) for text in texts]

    return asyncio.run(all_of_them())


async def outcome(trials, text, llm=None):
    try:
        await trials.check(llm or engine(), regex(text))
    except (InvalidRequestError, UnavailableError) as error:
        return error
    return None


@pytest.mark.parametrize(
    "what", ["from spins", "compile spins", "compile fills the memory", "compile aborts", "from finds no memory"]
)
def test_what_costs_too_much_is_refused(trials, what):
    """By processor time or memory, while it is read or compiled; the next one is tried as if nothing had been."""
    before, error, after = tried(trials, "a", what, "b")
    assert (before, after) == (None, None)
    assert isinstance(error, InvalidRequestError)
    assert str(error).startswith("structured_outputs.regex takes more than 1 s or 512 MB to compile: make it smaller")


@pytest.mark.parametrize("what", ["from is refused", "compile is refused"])
def test_what_xgrammar_refuses_is_refused_in_its_words(trials, caplog, what):
    """Without the place in its sources, and at some length only; the log has one line of it, the next one is tried as ever."""
    error, after = tried(trials, what, "b")
    assert after is None
    assert isinstance(error, InvalidRequestError)
    assert str(error).startswith(r"structured_outputs.regex is refused by xgrammar: No \p here.xxx")
    assert len(str(error)) < 500
    (line,) = [record for record in caplog.records if record.name == "triton_vllm.constraints.trials"]
    assert line.getMessage() == str(error)
    assert line.exc_info is None


def test_what_no_answer_can_follow_is_refused(trials):
    """xgrammar compiles it; vLLM would end the request without a word to the client."""
    error, after = tried(trials, "compile has a dead end", "b")
    assert after is None
    assert isinstance(error, InvalidRequestError)
    text = "structured_outputs.regex allows no token after 2 tokens of an answer: a rule may lead only to itself"
    assert str(error) == text


@pytest.mark.parametrize(("kind", "tekken", "refused"), [("lark", True, False), ("lark", False, True), ("regex", True, True)])
def test_grammars_that_vllm_gives_to_guidance_in_any_case_are_not_refused(trials, kind, tekken, refused):
    """Those in Lark's syntax with Mistral's newer tokenizer, among them its own for tool calls."""
    llm = SimpleNamespace(**vars(engine()), get_tokenizer=lambda: SimpleNamespace(is_tekken=tekken))
    constraint = Constraint("grammar", kind, "from is refused", 1)

    async def check():
        await trials.check(llm, constraint)

    if not refused:
        asyncio.run(check())
        return
    with pytest.raises(InvalidRequestError, match="is refused by xgrammar"):
        asyncio.run(check())


@pytest.mark.long
def test_nobody_waits_for_one_that_takes_long(trials):
    """Two are tried at the same time."""
    order = []

    async def note(text):
        await outcome(trials, text)
        order.append(text)

    async def both():
        await outcome(trials, "the worker is there")
        await asyncio.gather(note("compile spins"), note("a"))

    asyncio.run(both())
    assert order == ["a", "compile spins"]


LATE = "import socket; c = socket.socket(fileno=0); kept = socket.recv_fds(c, 1, 1); c.recv(1); raise SystemExit(1)"


@pytest.mark.long
@pytest.mark.parametrize("reason", ["import os; os.kill(os.getpid(), 9)", "import signal; signal.pause()", LATE])
def test_a_worker_that_could_not_start_this_time_is_started_the_next_time(trials, monkeypatch, tmp_path, reason):
    """It was killed or too slow: the client may try again, and no constraint goes to vLLM untried."""
    script, slow = module.SCRIPT, tmp_path / "slow.py"
    slow.write_text(reason)
    monkeypatch.setattr(module, "ANSWER_S", 0.5)
    monkeypatch.setattr(module, "WORKER_ENDS_S", 10.0 if reason == LATE else 0.1)
    monkeypatch.setattr(module, "SCRIPT", slow)
    assert isinstance(tried(trials, "compile spins")[0], UnavailableError)
    monkeypatch.setattr(module, "ANSWER_S", 60.0)
    monkeypatch.setattr(module, "SCRIPT", script)
    assert isinstance(tried(trials, "compile spins")[0], InvalidRequestError)


def test_a_killed_worker_is_started_again(trials):
    """The request in hand may be sent again."""
    assert tried(trials, "a") == [None]
    os.kill(trials._worker._process.pid, signal.SIGKILL)
    trials._worker._process.wait()
    first, second = tried(trials, "b", "b")
    assert isinstance(first, UnavailableError)
    assert second is None


def test_without_a_worker_vllm_compiles_as_ever(trials, tmp_path, monkeypatch):
    """The operator is told once, by a warning."""
    monkeypatch.setattr(module, "SCRIPT", tmp_path / "missing.py")
    assert tried(trials, "compile spins", "a") == [None, None]


def test_other_compilers_have_bounds_of_their_own(trials):
    """No worker is started for them."""
    assert tried(trials, "compile spins", llm=engine("guidance")) == [None]
    assert trials._worker is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"regex": "a+"}, ("regex", "regex", "a+")),
        ({"json": '{"type": "string"}'}, ("json", "json", '{"type": "string"}')),
        ({"grammar": 'root ::= "a"'}, ("grammar", "grammar", 'root ::= "a"')),
        ({"grammar": 'start: "a" // ::='}, ("grammar", "lark", 'start: "a" // ::=')),
        ({"grammar": '# ::=\nstart: "a"'}, ("grammar", "lark", '# ::=\nstart: "a"')),
        ({"structural_tag": "{}"}, ("structural_tag", "structural_tag", "{}")),
    ],
)
def test_what_is_to_be_compiled(fields, expected):
    """As vLLM hands it to xgrammar; the syntax of a grammar is told as vLLM tells it."""
    name, kind, text = expected
    assert to_compile(Limits(max_constraint_seconds=3), SimpleNamespace(**fields)) == Constraint(name, kind, text, 3)


@pytest.mark.parametrize("fields", [{}, {"choice": ["a"]}, {"json_object": True}])
def test_what_costs_little_is_not_tried(fields):
    """The size of a choice is bounded, and what a JSON object costs is known."""
    assert to_compile(Limits(), SimpleNamespace(**fields)) is None
    assert to_compile(Limits(), None) is None
