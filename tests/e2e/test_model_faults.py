"""An exception in each part of the served model, and a full TMPDIR: nobody waits for ever, and it serves on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.model_requests import ask, prompt
from support.open_stream import OpenStream
from support.patience import wait_for
from support.reference import ONE_THREAD
from support.server_processes import engines, stubs
from support.serving import fill, in_small_place, serve
from support.settings import with_line
from vllm_env.serve.processes import end
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.serving import Parts
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, ANSWER = FACTS[2]
PATIENCE = 240.0
NEIGHBOURS = 4
SMALL = "64m"  # as a container has it for shared memory
WHOLE = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}
DEAD = "Model is unavailable due to unhealthy vLLM engine"
# put into the copied model; a prompt that names a place makes the next calls there fail, three where a thread goes on
_FAULTS = """
from triton_vllm.startup import load
from triton_vllm.reply.watch import CancellationWatch
from triton_vllm.engine.runner import Runner

left = {}

def fail(place):
    if left.get(place, 0) > 0:
        left[place] -= 1
        raise RuntimeError(f"injected {place}")

def fails(owner, name, place):
    inner = getattr(owner, name)
    def outer(*args, **options):
        fail(place)
        return inner(*args, **options)
    setattr(owner, name, outer)

submit, use = Runner.submit, Runner.use

def begin(self, order, delivery):
    place = order.prompts[0].text.split()[0]
    left[place] = 3 if place == "watch" else 1
    job = submit(self, order, delivery)
    self._loop.call_soon_threadsafe(fail, "loop")
    return job

def start(self, llm, facts):
    use(self, llm, facts)
    fails(llm, "add_request", "add")
    fails(llm.output_processor, "process_outputs", "handler")

Runner.submit, Runner.use = begin, start
fails(CancellationWatch, "look", "watch")
fails(load, "deliver", "sender")
"""


@pytest.fixture(scope="module")
def faulty(parts: Parts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server whose model fails where a prompt says, and whose folder for temporary files is a small one of its own."""

    def prepare(model: Path) -> None:
        (model / "1" / "faults.py").write_text(_FAULTS, encoding="utf-8")
        with_line(model, "import faults", after="from triton_vllm.request import contract")

    small = in_small_place(parts, "$TMPDIR", tmp_path_factory.mktemp("small"), SMALL)
    with serve(small, environment=ONE_THREAD, prepare=prepare) as running:
        yield running


@pytest.mark.parametrize(
    ("place", "told", "neighbours"),
    [
        ("watch", set(), set()),
        ("loop", set(), set()),
        ("sender", {"the response could not be sent; the server's log tells why"}, None),
        ("add", {"the engine failed on this request; the server's log has the details"}, set()),
        ("handler", {DEAD}, {DEAD}),
    ],
)
def test_an_exception_leaves_nobody_waiting(
    faulty: TritonServer, place: str, told: set[str], neighbours: set[str] | None
) -> None:
    """The request that it met, and those in flight beside it, which only a dead engine takes along."""
    with ExitStack() as stack:
        beside = [stack.enter_context(OpenStream(faulty.grpc_url, prompt(PROMPT, WHOLE, stream=True))) for _ in range(NEIGHBOURS)]
        for one in beside:  # vLLM has them all, so none of them meets what is meant for the next
            one.wait(1, PATIENCE)
        met = stack.enter_context(OpenStream(faulty.grpc_url, prompt(f"{place} {PROMPT}", WHOLE, stream=True)))
        ends = [one.wait_end(PATIENCE) for one in (met, *beside)]
    errors = [{end.error} - {""} for end in ends]
    if neighbours is None:  # whose output was sent next, one of them
        assert [error for error in errors if error] == [told]
    else:
        assert errors[0] == told
        assert set().union(*errors[1:]) <= neighbours
    wait_for(lambda: not ask(faulty, PROMPT, {"temperature": 0}).error, "an engine that serves", longest_pause=0.5)
    assert ask(faulty, PROMPT, {"temperature": 0}).text == PROMPT + ANSWER

    def injected() -> int:
        lines = faulty.log.read_text(errors="replace").splitlines()  # vLLM has its own line of its output handler
        return len([line for line in lines if "[vllm]" in line and f"RuntimeError: injected {place}" in line])

    wait_for(injected, "the log's line")
    assert injected() == 1


def test_no_room_for_temporary_files(faulty: TritonServer) -> None:
    """Answers need none, nor does an engine that is started again: all are served, or told at once."""
    (stub,) = stubs(faulty)
    folder = Path(f"/proc/{faulty.pid}/root{stub.environ()['TMPDIR']}")
    fill(folder / "filler")
    with pytest.raises(OSError, match="No space left"):
        (folder / "more").write_bytes(bytes(1 << 13))
    constrained = {"structured_outputs": {"regex": "[a-z]{4}"}, "max_tokens": 8}
    assert ask(faulty, PROMPT, {"temperature": 0}).text == PROMPT + ANSWER
    assert ask(faulty, PROMPT, constrained).error == ""
    assert any("trial_process" in " ".join(process.cmdline()) for process in faulty.members())  # in which it was tried
    whole = prompt(PROMPT, WHOLE, stream=True)
    with ExitStack() as stack:
        requests = [stack.enter_context(OpenStream(faulty.grpc_url, whole)) for _ in range(4)]
        requests[0].wait(3)
        end(list(engines(faulty)), grace=0)
        assert {request.wait_end(PATIENCE).error for request in requests} <= {"", DEAD}
    wait_for(
        lambda: not ask(faulty, PROMPT, {"temperature": 0}).error,
        lambda: f"an engine that serves\n{faulty.log.read_text(errors='replace')[-4000:]}",
        limit=PATIENCE,
        longest_pause=0.5,
    )
