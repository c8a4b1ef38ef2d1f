"""The corpus against admission alone: what can be refused without vLLM is, in the documented words and not many of them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support import fake_triton, fake_vllm

fake_triton.install()  # what is imported next needs Triton's module

from hostile.corpus import CORPUS, Case  # noqa: E402
from hostile.openai_corpus import OF_THE_PORT, Shot  # noqa: E402
from hostile.openai_taken import TAKEN_NOW  # noqa: E402
from support.gates import admitted as let_in  # noqa: E402
from support.gates import fit_of  # noqa: E402
from triton_vllm.base.errors import LONGEST_TEXT, AdapterError  # noqa: E402
from triton_vllm.base.limits import USUAL  # noqa: E402
from triton_vllm.openai.body import parse  # noqa: E402
from triton_vllm.openai.contents import check  # noqa: E402
from triton_vllm.openai.fields import ROUTES  # noqa: E402
from triton_vllm.request.kinds import Served  # noqa: E402
from triton_vllm.vllm_api import Facts  # noqa: E402
from triton_vllm.vllm_api.bodies import BodyType  # noqa: E402

NAMES = ("SamplingParams", "StructuredOutputsParams", "RequestOutputKind", "PoolingParams")
VLLM: Any = SimpleNamespace(**{name: getattr(fake_vllm, name) for name in NAMES}, client_errors=(ValueError,))
FACTS = Facts(("generate",), max_tokens=256, vocabulary=512, multimodal=False, seats=1024)
INTERNALS = ("Traceback", "NoneType", "object at 0x", ".py", "site-packages", "triton_vllm", "<class", "KeyError", "/etc/passwd")
REFUSED_WITHOUT_VLLM = 123  # of those below, at least: what a check no longer finds is left to vLLM
# Those with a status are refused while they are read.
SHOTS = [shot for shot in (*OF_THE_PORT, *TAKEN_NOW) if not shot.status]


def array(value: Any) -> Any:
    """Return a tensor as Triton's stub hands it over."""
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], str):
        return np.array([v.encode() for v in values], dtype=object)
    return np.array(values, dtype=np.int64 if type(values[0]) is int else None)


def admitted(case: Case) -> tuple[Any, list[Any]]:
    """Return the job and the errors of a case."""
    request = fake_triton.Request({name: array(value) for name, value in case.make().items()})
    job = let_in(request, Served("vllm", VLLM, fit_of(FACTS), lambda name: None))
    return job, [response.error for response in request.sender.told()]


def test_names_are_names() -> None:
    """Each tells one case from all others."""
    assert [name for name, count in Counter(case.name for case in CORPUS).items() if count > 1] == []
    assert len(CORPUS) >= 150


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case.name)
def test_what_is_too_much_is_refused_without_vllm(case: Case) -> None:
    """One error with the documented text, short, without internals; what is left to vLLM gets as far as that."""
    job, errors = admitted(case)
    if not case.refused_early:
        assert (job is not None, errors) == (True, [])
        return
    (error,) = errors
    assert job is None
    assert case.expected in error.message
    assert error.code in ("INVALID_ARG", "UNSUPPORTED")
    assert 0 < len(error.message) <= LONGEST_TEXT
    assert not [word for word in INTERNALS if word in error.message]


def refusal(shot: Shot) -> str | None:
    """Return the port's refusal of a body that has been read; None if the rest is left to vLLM."""
    try:
        body = parse(USUAL, shot.make(), FACTS)
        check(ROUTES[shot.path], BodyType((), frozenset()), body, fit_of(FACTS, in_flight=1))
    except AdapterError as error:
        return str(error)
    return None


def test_most_of_what_the_port_refuses_is_refused_without_vllm() -> None:
    """With the documented text, short, without internals; test_openai_port.py has what is left to vLLM."""
    told = [(shot, text) for shot in SHOTS if (text := refusal(shot)) is not None]
    assert [(shot.name, text) for shot, text in told if shot.says not in text] == []
    assert [text for _, text in told if any(word in text for word in INTERNALS)] == []
    assert all(0 < len(text) <= LONGEST_TEXT for _, text in told)
    assert len(told) >= REFUSED_WITHOUT_VLLM
