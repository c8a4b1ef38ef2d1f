"""The tool sees a fault that is planted into the pinned vLLM, and exits accordingly."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest

import vllm_contract
from triton_vllm.startup.toolkit import SWITCHES

pytestmark = pytest.mark.long

ENGINE = "v1/engine/async_llm.py"
LLM = "vllm.v1.engine.async_llm.AsyncLLM"
# what is planted: module, text, its replacement (None: the text is added) and the line that must tell it
WRONG = {
    "a renamed keyword": (ENGINE, "priority: int = 0,", "rank: int = 0,", f"{LLM}.add_request(priority=): gone"),
    "a parameter more": (
        *(ENGINE, "self, lora_request: LoRARequest)", "self, lora_request: LoRARequest, pin: bool)"),
        f"{LLM}.add_lora(pin=): required now",
    ),
    "a sync method turned async": (
        ENGINE,
        "    def shutdown(self",
        "    async def shutdown(self",
        f"{LLM}.shutdown: is async now",
    ),
    "an async method turned sync": (
        *(ENGINE, "    async def is_sleeping(self", "    def is_sleeping(self"),
        f"{LLM}.is_sleeping: is no longer async",
    ),
    "a parser's method that is gone": (
        *("parser/abstract_parser.py", "    def parse_delta(", "    def parse_piece("),
        "vllm.parser.abstract_parser.Parser.parse_delta: gone",
    ),
    "a field of a chat request that is gone": (
        *("entrypoints/openai/chat_completion/protocol.py", "    def extract_structured_outputs(", "    def constraint("),
        "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest.extract_structured_outputs: gone",
    ),
    "a gone field": (
        *("outputs.py", "    stop_reason: int | str | None = None\n", ""),
        "vllm.outputs.CompletionOutput.stop_reason: gone",
    ),
    "a changed default": (
        *("sampling_params.py", "max_tokens: int | None = 16\n", "max_tokens: int | None = 64\n"),
        "vllm.sampling_params.SamplingParams.max_tokens: its default is 64, and the adapter counts on 16",
    ),
    "token ids that nobody checks": (
        *("sampling_params.py", "    logprob_token_ids: list[int] | None = None\n"),
        "    logprob_token_ids: list[int] | None = None\n    first_token_ids: list[int] | None = None\n",
        "vllm.sampling_params.SamplingParams.first_token_ids: token ids that nobody checks",
    ),
    "a field that must be given": (
        *("pooling_params.py", "    task: PoolingTask | None = None\n", "    task: PoolingTask\n    pooler: str\n"),
        "vllm.pooling_params.PoolingParams(pooler=): required now",
    ),
    "another order of fields": (
        *("lora/request.py", "    lora_name: str\n", "    lora_kind: str = ''\n    lora_name: str\n"),
        "vllm.lora.request.LoRARequest: its first fields are no longer lora_name, lora_int_id, lora_path",
    ),
    "a new finish reason": (
        *("v1/engine/__init__.py", '"error", "repetition")', '"error", "repetition", "preempted")'),
        "finish reason 'preempted': the adapter does not know it",
    ),
    "a finish reason that is gone": (
        *("v1/engine/__init__.py", '"error", "repetition")', '"failed", "repetition")'),
        "finish reason 'error': gone, and a failed request would pass for an answer",
    ),
    "another constructor of a decoder": (
        *(
            "multimodal/media/video.py",
            "        image_io: ImageMediaIO,\n",
            "        image_io: ImageMediaIO,\n        cache: dict,\n",
        ),
        "vllm.multimodal.media.VideoMediaIO.__init__(cache=): required now",
    ),
    "other figures of a front end": (
        *("v1/metrics/loggers.py", "        engine_idx: int | None = None,\n    ):", "        rank: int | None = None,\n    ):"),
        "vllm.v1.metrics.loggers.StatLoggerManager.record(engine_idx=): gone",
    ),
    "a refusal that is none": (
        *("sampling_params.py", "\n\nclass OddError(LookupError): ...\n\n\ndef f():\n    raise OddError('no')\n", None),
        "vllm.sampling_params: raises OddError, which the adapter takes for no refusal",
    ),
    "an exception that is gone": (
        *("v1/engine/exceptions.py", "class EngineDeadError", "class EngineGoneError"),
        "EngineDeadError in vllm.v1.engine.exceptions: gone",
    ),
    **{
        f"a renamed variable, {switch.variable}": (
            *("envs.py", f'    "{switch.variable}": ', f'    "VLLM_ONCE_{switch.variable}": '),
            f"variable {switch.variable}: not known any more",
        )
        for switch in SWITCHES
    },
    "another statement": (
        *(ENGINE, "await self.add_request(", "await self.begin_request("),
        "vllm.v1.engine.async_llm: no 'await self.add_request(' any more",
    ),
}


@pytest.fixture
def told(capsys):
    """Return a function that runs the command and returns its exit code, vLLM's version and what is wrong."""

    def run(vllm):
        code = vllm_contract.main([str(vllm)])
        first, *lines = capsys.readouterr().out.splitlines()
        return code, first.removeprefix("vLLM ").partition(":")[0], [line.strip() for line in lines]

    return run


@pytest.mark.parametrize("kind", [0, 1])
def test_what_the_adapter_needs_and_is_gone_or_changed_is_wrong(planted, told, kind):
    """Exit code 1, and a line for each fault. One vLLM has half of them, for reading it takes a second: no two of one text."""
    faults = list(WRONG.values())[kind::2]
    code, _, wrong = told(planted(*(fault[:3] for fault in faults)))
    assert [line for *_, line in faults if line not in wrong] == []
    assert code == 1


def test_nothing_is_wrong_with_the_pinned_vllm(pinned_folder, told):
    """Exit code 0, and no line."""
    code, _, wrong = told(pinned_folder)
    assert (code, wrong) == (0, [])


def test_a_wheel_is_read_like_a_folder(small, pinned_folder, told, tmp_path):
    """No pip and no network for one that is here."""
    modules = ("sampling_params", "outputs", "v1.engine.async_llm")
    folder = small("0.30.0", **{m: (pinned_folder / "vllm" / f"{m.replace('.', '/')}.py").read_text("utf-8") for m in modules})
    wheel = tmp_path / "vllm-0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in folder.rglob("*.py"):
            archive.write(path, path.relative_to(folder))
    found = told(folder)
    assert told(wheel) == found
    _, version, wrong = found
    assert version == "0.30.0"
    assert f"{LLM}.add_request: gone" not in wrong


@pytest.mark.parametrize("version", ["0.33.1rc1.dev7+g1", "0.1.dev1+gabcdef", "dev"])
def test_a_version_of_a_clone_is_the_newest(small, told, version):
    """Without tags it is called 0.1.dev…; it must have all that any version must have."""
    code, _, wrong = told(small(version))
    assert "VLLMClientError in vllm.exceptions: gone" in wrong  # since 0.28
    assert code == 1


def test_an_older_release_is_told_to_be_one(small, told):
    """Of it nothing is known, and so nothing is promised."""
    code, _, wrong = told(small("0.9.0"))
    assert (code, wrong) == (1, ["vLLM 0.9.0: older than 0.11, the oldest that the adapter takes"])


def test_what_this_python_cannot_read_is_no_contract(small, capsys):
    """The file is named; exit code 1 would mean that something is gone."""
    assert vllm_contract.main([str(small("0.33.0", outputs="stop_reason: = None\n"))]) == 2
    assert "outputs.py cannot be read by Python" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "WHEEL|FOLDER|VERSION"),
        ([], 2, "usage"),
        (["{empty}"], 2, "holds no package vllm"),
        (["{empty}/none.whl"], 2, "there is no wheel"),
        (["{broken}"], 2, "cannot be read as a wheel"),
    ],
)
def test_usage(tmp_path, arguments, code, said):
    """As a program of its own: 2 is wrong usage, or no such vLLM, and the text says what to name instead."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.whl").write_bytes(b"no zip")
    names = {"empty": tmp_path / "empty", "broken": tmp_path / "broken.whl"}
    command = [sys.executable, vllm_contract.__file__, *(a.format(**names) for a in arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == code
    assert said in run.stdout + run.stderr
    assert "Traceback" not in run.stderr
