"""The operator's limits of audio become vLLM's own variables."""

from __future__ import annotations

import pytest

from triton_vllm.base.limits import Limits
from triton_vllm.media.audio import MEGABYTES_VARIABLE, SECONDS_VARIABLE, UNBOUNDED, limit

BOTH = {SECONDS_VARIABLE, MEGABYTES_VARIABLE}


@pytest.mark.parametrize(
    ("limits", "seconds", "megabytes"),
    [
        (Limits(), "600", "32"),
        (Limits(max_clip_seconds=30, max_clip_bytes=(1 << 20) + 1), "30", "2"),
        (Limits(max_clip_seconds=0, max_clip_bytes=0), str(UNBOUNDED), str(UNBOUNDED)),
    ],
)
def test_each_limit_has_its_variable(limits, seconds, megabytes):
    """In whole megabytes, upwards; no limit is a large one, for vLLM takes 0 as nothing allowed."""
    environ: dict[str, str] = {}
    limit(limits, BOTH, environ)
    assert environ == {SECONDS_VARIABLE: seconds, MEGABYTES_VARIABLE: megabytes}


def test_what_the_operator_has_set_stays():
    """Also where it allows more."""
    environ = {SECONDS_VARIABLE: "3600", MEGABYTES_VARIABLE: "1"}
    limit(Limits(), BOTH, environ)
    assert environ == {SECONDS_VARIABLE: "3600", MEGABYTES_VARIABLE: "1"}


def test_a_vllm_gets_only_variables_that_it_knows():
    """Others it would warn of, or refuse."""
    environ: dict[str, str] = {}
    limit(Limits(), {SECONDS_VARIABLE, "VLLM_OTHER"}, environ)
    assert set(environ) == {SECONDS_VARIABLE}
