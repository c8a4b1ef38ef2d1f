"""The ends of requests come later, in their order, and none is lost."""

from __future__ import annotations

import threading

import pytest

from support.clock import now
from support.fake_log import FakeLog
from support.patience import LIMIT, pause
from triton_vllm.reply.endings import Endings


@pytest.fixture
def log():
    return FakeLog()


@pytest.fixture
def endings(log):
    endings = Endings(log, "triton-end")
    endings.start()
    yield endings
    endings.close()


def test_an_end_comes_after_its_pause(endings):
    """Not before."""
    came = threading.Event()
    began = now()
    endings.put(came.set, 0.05)
    assert came.wait(LIMIT)
    assert now() - began >= 0.05


def test_an_end_overtakes_one_that_has_to_wait_longer(endings):
    """The thread sleeps until the first is due, and is woken for another that is due earlier."""
    came = threading.Event()
    endings.put(lambda: None, 3600.0)
    pause(0.05)  # the thread sleeps
    endings.put(came.set, 0.01)
    assert came.wait(LIMIT)


def test_one_that_fails_is_logged_and_the_others_come(endings, log):
    """Triton may refuse an end."""
    came = threading.Event()
    endings.put(lambda: 1 / 0, 0.0)
    endings.put(came.set, 0.01)
    assert came.wait(LIMIT)
    assert "a request was not ended: ZeroDivisionError" in str(log.lines)


def test_none_is_lost_when_the_model_is_unloaded(log):
    """Those that wait come at once, and later ones in the caller's thread."""
    endings = Endings(log, "triton-end")
    endings.start()
    came = []
    endings.put(lambda: came.append("waited"), 3600.0)
    endings.close()
    assert came == ["waited"]
    endings.put(lambda: came.append("late"), 3600.0)
    assert came == ["waited", "late"]
