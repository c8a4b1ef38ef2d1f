"""Shared memory, or the folder for temporary files, runs full while answers are on their way: each client is answered."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.leftovers import name_of
from support.model_requests import ask, prompt
from support.open_stream import OpenStream
from support.patience import wait_for
from support.reference import ONE_THREAD
from support.serving import in_small_place, serve
from vllm_env.serve.processes import end
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.serving import Parts
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, ANSWER = FACTS[2]
SIZE = "64m"  # as a container has it
# some MB of log probabilities, where Triton's region has 1 MB until it grows
LARGE = {"n": 8, "logprobs": 20, "max_tokens": 200, "ignore_eos": True}
ANSWERED = 120.0
BACK = 300.0
DEAD = "Model is unavailable due to unhealthy vLLM engine"


@pytest.fixture(scope="module")
def small_memory(light_parts: Parts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A light server whose shared memory is its own, as in a container; its tests leave it as they found it."""
    with served(light_parts, "/dev/shm", tmp_path_factory.mktemp("small")) as server:
        yield server


@pytest.fixture
def small_folder(parts: Parts, tmp_path: Path) -> Iterator[TritonServer]:
    """A server whose folder for temporary files is its own."""
    with served(parts, "$TMPDIR", tmp_path) as server:
        yield server


@contextmanager
def served(parts: Parts, place: str, folder: Path) -> Iterator[TritonServer]:
    """Serve with a small ``place``, as the shell has it."""
    with serve(in_small_place(parts, place, folder, SIZE), environment=ONE_THREAD) as server:
        yield server


def shared_memory(server: TritonServer) -> Path:
    """Return the server's ``/dev/shm`` as it is seen from here."""
    return Path(f"/proc/{server.pid}/root/dev/shm")


def fill(file: Path) -> None:
    """Leave no byte of a file system, which must be one of the test's own and not the machine's disk."""
    assert shutil.disk_usage(file.parent).total <= 1 << 26, f"{file.parent} is not the small one"
    with file.open("wb", buffering=0) as sink:
        for size in (1 << 20, 1 << 12):
            try:
                while sink.write(bytes(size)):
                    pass
            except OSError:
                continue


@pytest.mark.parametrize("streaming", [False, True])
def test_an_answer_that_does_not_fit_ends_in_an_error(small_memory: TritonServer, streaming: bool) -> None:
    """Triton has closed the request when it finds that out; its client must not wait for what cannot come any more."""
    small = small_memory
    filler = shared_memory(small) / "filler"
    large = prompt(PROMPT, LARGE, stream=streaming, return_logprobs=True)
    fill(filler)
    with ExitStack() as stack:
        requests = [stack.enter_context(OpenStream(small.grpc_url, large)) for _ in range(4)]
        ends = [request.wait_end(ANSWERED) for request in requests]
    assert all(end.final or end.error for end in ends)
    if not streaming:  # streamed, each response is small
        assert "could not be sent" in "".join(end.error for end in ends)
    assert ask(small, PROMPT, {"temperature": 0}).text == PROMPT + ANSWER  # short ones fit all the while
    filler.unlink()
    with OpenStream(small.grpc_url, large) as again:
        assert again.wait_end(ANSWERED).error == ""


def test_no_room_for_temporary_files(small_folder: TritonServer) -> None:
    """Answers need none, nor does an engine that is started again: all are served, or told at once."""
    small = small_folder
    (stub,) = [p for p in small.members() if name_of(p).startswith("triton_python_b")]
    folder = Path(f"/proc/{small.pid}/root{stub.environ()['TMPDIR']}")
    fill(folder / "filler")
    with pytest.raises(OSError, match="No space left"):
        (folder / "more").write_bytes(bytes(1 << 13))
    constrained = {"structured_outputs": {"regex": "[a-z]{4}"}, "max_tokens": 8}
    assert ask(small, PROMPT, {"temperature": 0}).text == PROMPT + ANSWER
    assert ask(small, PROMPT, constrained).error == ""
    assert any("trial_process" in " ".join(process.cmdline()) for process in small.members())  # in which it was tried
    large = prompt(PROMPT, LARGE, stream=True)
    with ExitStack() as stack:
        requests = [stack.enter_context(OpenStream(small.grpc_url, large)) for _ in range(4)]
        requests[0].wait(3)
        end([p for p in small.members() if name_of(p).startswith("VLLM::EngineCor")], grace=0)
        assert {request.wait_end(ANSWERED).error for request in requests} <= {"", DEAD}
    wait_for(
        lambda: not ask(small, PROMPT, {"temperature": 0}).error,
        lambda: f"an engine that serves\n{small.log.read_text(errors='replace')[-4000:]}",
        limit=BACK,
        longest_pause=0.5,
    )
