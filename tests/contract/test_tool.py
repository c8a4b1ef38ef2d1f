"""The tool sees a fault that is planted into the pinned vLLM, says what is new, gone and changed, and exits accordingly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile

import pytest

import vllm_contract
from triton_vllm.startup.toolkit import SWITCHES

pytestmark = pytest.mark.long

ENGINE, PROCESSOR = "v1/engine/async_llm.py", "v1/engine/output_processor.py"
LLM = "vllm.v1.engine.async_llm.AsyncLLM"
HANDLER = f"{LLM}._run_output_handler.output_handler"
ABORT = "vllm.v1.engine.output_processor.OutputProcessor.abort_requests"
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
    "generators that are made by another name": (
        *("v1/worker/gpu_model_runner.py", "generator = torch.Generator(device=self.device)", "generator = made(self.device)"),
        "vllm.v1.worker.gpu_model_runner: no 'generator = torch.Generator(device=self.device)' any more",
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
    "a new caller of put": (
        *("v1/engine/core_client.py", "\n\ndef late(processor, n, out):\n    processor.request_states[n].queue.put(out)\n", None),
        "RequestOutputCollector.put: called in vllm.v1.engine.core_client.late(out) now",
    ),
    "a caller of put by reference": (
        *(
            "v1/engine/core_client.py",
            "\n\ndef late(loop, state):\n    loop.call_soon(state.queue.put, None)\n",
            None,
        ),
        "RequestOutputCollector.put: called in vllm.v1.engine.core_client.late(by reference) now",
    ),
    "an end of a cancelled request that is not put": (
        *(PROCESSOR, "queue.put(request_output)", "queue.done = request_output"),
        f"RequestOutputCollector.put: not called in {ABORT}(request_output) any more",
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
    "something new that is put": (
        *(PROCESSOR, "queue.put(request_output)", "queue.put(ValueError(request_output))"),
        f"RequestOutputCollector.put: called in {ABORT}(ValueError(request_output)) now",
    ),
    "another handler": (
        *(ENGINE, "\n\nasync def drain(llm, outputs):\n    llm.output_processor.process_outputs(outputs)\n", None),
        f"OutputProcessor.process_outputs: called by {HANDLER}, vllm.v1.engine.async_llm.drain, and not by {HANDLER} alone",
    ),
    "no collector": (
        *(ENGINE, "    ) -> RequestOutputCollector:", "    ) -> RequestStream:"),
        f"{LLM}.add_request: returns RequestStream, and no RequestOutputCollector",
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
        *("model_executor/models/registry.py", 'sys.executable, "-m", ', 'sys.executable, "-P", "-m", '),
        (
            "vllm.model_executor.models.registry: no "
            "\"_SUBPROCESS_COMMAND = [sys.executable, '-m', 'vllm.model_executor.models.registry']\" any more"
        ),
    ),
}
# the same for what is told and is nothing wrong, by the section that tells it
TOLD = {
    "new": (
        "sampling_params.py",
        "    seed: int | None",
        "    luck: int = 7\n    seed: int | None",
        "SamplingParams.luck: int = 7",
    ),
    "gone": ("outputs.py", "    routed_experts: ", "    experts: ", "CompletionOutput.routed_experts: np.ndarray | None = None"),
    "changed": ("sampling_params.py", "temperature: float = 1.0", "temperature: float = 0.7", "float = 1.0  ->  float = 0.7"),
}


@pytest.fixture
def told(capsys):
    """Return a function that runs the command and returns its exit code and the lines of each section of its answer."""

    def run(vllm):
        code = vllm_contract.main([str(vllm)])
        first, *lines = capsys.readouterr().out.splitlines()
        said = {"version": first.removeprefix("vLLM ").partition(",")[0]}
        section = ""
        for line in lines:
            if line.startswith("  "):
                said[section].append(line.strip())
            else:
                section = re.split("[,:]", line)[0]
                said[section] = []
        return code, said

    return run


@pytest.mark.parametrize("kind", [0, 1])
def test_what_the_adapter_needs_and_is_gone_or_changed_is_wrong(planted, told, kind):
    """Exit code 1, and a line for each fault. One vLLM has half of them, for reading it takes a second: no two of one text."""
    faults = list(WRONG.values())[kind::2]
    code, said = told(planted(*(fault[:3] for fault in faults)))
    assert [line for *_, line in faults if line not in said["wrong"]] == []
    assert code == 1


def test_what_the_adapter_does_not_count_on_is_told(planted, told):
    """Exit code 0: a person reads the list, and a script goes on."""
    code, said = told(planted(*(told[:3] for told in TOLD.values())))
    assert (code, said["wrong"]) == (0, [])
    untold = [section for section, (*_, line) in TOLD.items() if not any(line in entry for entry in said[section])]
    assert untold == []


def test_the_pinned_vllm_is_as_recorded_for_people_too(pinned_folder, capsys):
    """Text says what JSON does."""
    assert vllm_contract.main([str(pinned_folder)]) == 0
    title, *sections = capsys.readouterr().out.splitlines()
    assert "compared with the recorded" in title
    assert sections == ["wrong, the adapter needs it: nothing", "new: nothing", "gone: nothing", "changed: nothing"]


def test_a_wheel_is_read_like_a_folder(small, pinned_folder, told, tmp_path):
    """No pip and no network for one that is here."""
    modules = ("sampling_params", "outputs", "v1.engine.async_llm")
    folder = small("0.30.0", **{m: (pinned_folder / "vllm" / f"{m.replace('.', '/')}.py").read_text("utf-8") for m in modules})
    wheel = tmp_path / "vllm-0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in folder.rglob("*.py"):
            archive.write(path, path.relative_to(folder))
    code, said = told(folder)
    assert told(wheel) == (code, said)
    assert said["version"] == "0.30.0"
    assert f"{LLM}.add_request: gone" not in said["wrong"]


def test_a_fault_is_told_to_people_and_never_recorded(planted, pinned_folder, capsys, tmp_path, monkeypatch):
    """`--record` writes the file that the next run compares with."""
    record = tmp_path / "record.json"
    record.write_bytes(vllm_contract.RECORD.read_bytes())
    monkeypatch.setattr(vllm_contract, "RECORD", record)
    folder = planted(("outputs.py", "    stop_reason: int | str | None = None\n", ""))
    before = record.read_bytes()
    assert vllm_contract.main([str(folder), "--record"]) == 1
    assert "gone: 1\n  vllm.outputs.CompletionOutput.stop_reason" in capsys.readouterr().out
    assert record.read_bytes() == before
    record.write_text(json.dumps({"version": "0.1.0"}))
    assert vllm_contract.main([str(pinned_folder), "--record"]) == 0
    assert record.read_bytes() == before


@pytest.mark.parametrize("version", ["0.33.1rc1.dev7+g1", "0.1.dev1+gabcdef", "dev"])
def test_a_version_of_a_clone_is_the_newest(small, told, version):
    """Without tags it is called 0.1.dev…; it must have all that any version must have."""
    code, said = told(small(version))
    assert "VLLMClientError in vllm.exceptions: gone" in said["wrong"]  # since 0.28
    assert code == 1


def test_an_older_release_is_told_to_be_one(small, told):
    """Of it nothing is known, and so nothing is promised."""
    code, said = told(small("0.9.0"))
    assert (code, said["wrong"]) == (1, ["vLLM 0.9.0: older than 0.11, the oldest that the adapter takes"])


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
