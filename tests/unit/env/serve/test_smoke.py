"""The smoke run: the copy that is served, the check of the answers, and what stays as it was."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support import fake_tritonserver
from support.small_fixtures import workspace_in
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.model.files import environment_of
from vllm_env.serve import smoke
from vllm_env.serve.smoke import SmokeRequest, copied, copy_model, set_arguments, smoke_run
from vllm_env.triton.root import is_plain

if TYPE_CHECKING:
    from vllm_env.base.workspace import Workspace

pytestmark = pytest.mark.long

CONFIG = 'parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "$$TRITON_MODEL_DIRECTORY/{}" }} }}\n'
CLIENT = """
import sys
options = dict(a[2:].split("=", 1) for a in sys.argv[1:] if "=" in a)
answers = {answers!r}
open(options["results-file"], "w").write("".join(a + "\\n\\n=========\\n\\n" for a in answers))
print("model", options["model"])
print("PASS: vLLM example")
sys.exit({status})
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A built model with an archive, as publish leaves it."""
    folder = tmp_path / "repository" / "vllm"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("# the model\n")
    (folder / "config.pbtxt").write_text(CONFIG.format("vllm_env.tar.gz"))
    (folder / "vllm_engine_args.json").write_text('{"model": "facebook/opt-125m"}\n')
    (folder / "vllm_env.tar.gz").write_bytes(b"archive")
    (folder / "triton_python_backend_stub").write_bytes(b"stub")
    (folder / "triton_python_backend_stub").chmod(0o755)
    return folder


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A cache in which nothing may stay."""
    return workspace_in(tmp_path / "cache")


@pytest.fixture
def request_(tmp_path: Path, model: Path) -> SmokeRequest:
    """A smoke run with a server that is ready at once; `client` says what answers come."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\nThe capital of France is\n")
    return SmokeRequest(
        binary=fake_tritonserver.launcher(tmp_path),
        model_folder=model,
        engine_model=str(tmp_path),
        client=make_client(tmp_path, [" there", " Paris, of course"]),
        prompts=prompts,
        log=tmp_path / "server.log",
        expected={"The capital of France is": " Paris"},
    )


def make_client(folder: Path, answers: list[str], status: int = 0) -> Path:
    path = folder / "client.py"
    path.write_text(CLIENT.format(answers=answers, status=status))
    return path


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_answers_come_back_and_nothing_else_changes(workspace: Workspace, request_: SmokeRequest, model: Path) -> None:
    """Answers by prompt, the client's lines; the published folder is untouched and the copy is gone."""
    before = snapshot(model)
    with copied(workspace, model) as copy:
        result = smoke_run(workspace, replace(request_, model_folder=copy))
    assert result.answers == (("Hello", " there"), ("The capital of France is", " Paris, of course"))
    assert result.client_lines == ("model vllm", "PASS: vLLM example")
    assert snapshot(model) == before
    assert list(workspace.cache.path("build").iterdir()) == []


@pytest.mark.parametrize("answers", [[" there", " London"], [" there", ""], [" there"]])
def test_wrong_or_missing_answer_fails(workspace: Workspace, request_: SmokeRequest, tmp_path: Path, answers: list[str]) -> None:
    """A model that does not say " Paris" is not the one that was trained, though every part answered."""
    make_client(tmp_path, answers)
    with pytest.raises(VllmEnvError, match=r"not with ' Paris'|answered nothing|1 answers to 2 prompts"):
        smoke_run(workspace, request_)
    assert list(workspace.cache.path("build").iterdir()) == []


@pytest.mark.parametrize("answer", ["", " \n"])
def test_an_empty_answer_fails_whatever_is_expected(
    workspace: Workspace, request_: SmokeRequest, tmp_path: Path, answer: str
) -> None:
    """Of a model that --smoke-model names nothing is expected, but that it says something."""
    make_client(tmp_path, [" there", answer])
    with pytest.raises(VllmEnvError, match=r"answered nothing to 'The capital of France is'.*--smoke-model"):
        smoke_run(workspace, replace(request_, expected={}))


def test_failed_client_fails_with_what_it_printed(workspace: Workspace, request_: SmokeRequest, tmp_path: Path) -> None:
    """Exit 1 of the client is a failed smoke run, with the server's log named."""
    make_client(tmp_path, [" there", " Paris"], status=1)
    with pytest.raises(CommandError, match=r"query the server.*server\.log") as failed:
        smoke_run(workspace, request_)
    assert "PASS" in failed.value.tail


def test_archive_is_named_by_its_path_and_the_stub_stays_executable(model: Path, tmp_path: Path) -> None:
    """A gigabyte is not copied, and not linked: a server of the original would take a new ctime for a changed model."""
    copy = tmp_path / "copy" / "vllm"
    before = (model / "vllm_env.tar.gz").stat()
    copy_model(model, copy)
    assert (model / "vllm_env.tar.gz").stat().st_ctime_ns == before.st_ctime_ns
    assert not (copy / "vllm_env.tar.gz").exists()
    assert f'"{model}/vllm_env.tar.gz"' in (copy / "config.pbtxt").read_text()
    assert os.access(copy / "triton_python_backend_stub", os.X_OK)
    assert not (copy / "vllm_engine_args.json").exists()
    assert (copy / "1" / "model.py").is_file()


def test_what_triton_mistakes_is_served_by_links(
    workspace: Workspace, request_: SmokeRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment next to the model, and the stand-in. The links are gone afterwards."""
    moved = model.parent.rename(tmp_path / "with space") / model.name
    standin = tmp_path / "stand in"
    standin.mkdir()
    seen: list[Path] = []

    def noted(folder: Path, arguments: Any, own: Any) -> None:
        set_arguments(folder, arguments, own)
        assert standin.samefile(arguments["model"])
        seen.append(Path(arguments["model"]))

    monkeypatch.setattr(smoke, "set_arguments", noted)
    with copied(workspace, moved) as copy:
        environment = Path(environment_of(copy))
        assert environment.samefile(moved / "vllm_env.tar.gz")
        result = smoke_run(workspace, replace(request_, model_folder=copy, engine_model=str(standin)))
    assert result.engine_args["model"] == str(standin)
    assert len(seen) == 1
    assert all(is_plain(path) and not path.exists() for path in (environment, *seen))


def test_one_file_of_arguments_is_written(model: Path) -> None:
    """Where the model has `1/model.json`, there: two files that differ would be refused."""
    (model / "vllm_engine_args.json").unlink()
    (model / "1" / "model.json").write_text('{"model": "mine"}')
    set_arguments(model, {"model": "x"})
    assert json.loads((model / "1" / "model.json").read_text()) == {"model": "x"}
    assert not (model / "vllm_engine_args.json").exists()


def test_a_model_is_served_with_its_own_files(workspace: Workspace, request_: SmokeRequest, model: Path) -> None:
    """Its engine arguments and adapters as they are given, and all of its GPUs."""
    gpus = 'parameters { key: "GPU_DEVICE_IDS" value: { string_value: "0,1" } }'
    (model / "config.pbtxt").write_text(CONFIG.format("vllm_env.tar.gz") + gpus)
    own: dict[str, dict[str, Any]] = {
        "1/model.json": {"model": "org/name", "enable_lora": True},
        "1/multi_lora.json": {"a": "/adapters/a"},
    }
    assert smoke_run(workspace, replace(request_, own=own)).engine_args == own["1/model.json"]
    assert {name: json.loads((model / name).read_text()) for name in own} == own
    assert gpus in (model / "config.pbtxt").read_text()


@pytest.mark.parametrize(
    ("entry", "given", "taken"),
    [
        ('parameters { key: "GPU_DEVICE_IDS" value: { string_value: @ } }', '"0,1"', '"0"'),
        (
            'parameters: [\n  {\n    key: "GPU_DEVICE_IDS"\n    value {\n string_value:@\n }\n  }\n]',
            '" 3 , 1, 2"',
            '" 3 "',
        ),
        ("parameters{key:'GPU_DEVICE_IDS',value:{string_value:@}}", "'1,0'", "'1'"),
        (
            'parameters {\n key: "GPU_DEVICE_IDS" # the "fast", near ones\n value: { string_value: @ }\n}',
            '"2,3"',
            '"2"',
        ),
        ('parameters { key: "GPU_DEVICE_IDS" value: { string_value: @ } }', '"5"', '"5"'),
        ('parameters { key: "OTHER" value: { string_value: @ } }', '"0,1"', '"0,1"'),
    ],
)
def test_the_first_of_several_gpus_is_taken(model: Path, entry: str, given: str, taken: str) -> None:
    """The smoke run's engine takes one GPU, whatever tensor_parallel_size the user's own arguments have."""
    text = CONFIG.format("vllm_env.tar.gz") + entry + "\nversion_policy { specific: { versions: [1, 2] } }\n"
    (model / "config.pbtxt").write_text(text.replace("@", given))
    set_arguments(model, {"model": "x"})
    assert (model / "config.pbtxt").read_text() == text.replace("@", taken)
