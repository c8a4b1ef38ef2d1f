"""What ``adopt`` does not take, as a source and as a target; nothing is written then."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from support.official_folder import manifest, snapshot
from support.repositories import CHECKOUT
from vllm_env.base.errors import UsageError, VllmEnvError
from vllm_env.cli.main import main
from vllm_env.model.files import check_model_folder
from vllm_env.publish.adopt import read_adoption

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEMPLATE = CHECKOUT / "model_repository" / "vllm"


def _config(text: str) -> Callable[[Path], object]:
    return lambda model: (model / "config.pbtxt").write_text(text)


def _arguments(text: str) -> Callable[[Path], object]:
    return lambda model: (model / "1/model.json").write_text(text)


def _ours(model: Path) -> None:
    (model / "1/triton_vllm").mkdir()
    place = "$$TRITON_MODEL_DIRECTORY/vllm_env"
    parameter = f'parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{place}" }} }}'
    (model / "config.pbtxt").write_text(f'backend: "python"\n{parameter}')


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: (model / "config.pbtxt").unlink(), r"config.pbtxt is missing"),
        (lambda model: (model / "config.pbtxt").write_bytes(b"\xff"), "config.pbtxt cannot be read"),
        (lambda model: (model / "config.pbtxt").write_bytes(b'\nname: "\xe9"'), "line 2 has a string that is not UTF-8"),
        (_config('backend: "tensorrtllm"'), 'names the backend "tensorrtllm"'),
        (_config('backend: "python"'), 'names the backend "python"'),
        (_config("{"), "as a model configuration"),
        (_ours, "is a model of this project already"),
        (lambda model: (model / "3").mkdir(), "has the versions 1, 3"),
        (lambda model: (model / "1").rename(model / "2"), "has the versions 2,"),
        (lambda model: shutil.rmtree(model / "1"), "has no version"),
        (lambda model: (model / "1/model.json").unlink(), "model.json is missing"),
        (_arguments("[1]"), "holds a JSON list"),
        (_arguments("[" * 100_000), "is not JSON"),
        (lambda model: (model / "vllm_engine_args.json").write_text("[" * 100_000), "vllm_engine_args.json is not JSON"),
        (lambda model: (model / "1/multi_lora.json").write_text("1"), "multi_lora.json holds a JSON int"),
        (lambda model: (model / "vllm_engine_args.json").write_text('{"model": "x"}'), "differ: enable_lora, model"),
    ],
)
def test_what_is_no_model_to_adopt_is_refused(official: Path, target: Path, change: Callable[[Path], object], said: str) -> None:
    """By name, with a remedy, and nothing is written."""
    change(official)
    before = snapshot(official.parents[1])
    with pytest.raises(VllmEnvError, match=said) as caught:
        read_adoption(official, target, TEMPLATE, "vllm_env")
    assert caught.value.remedy
    assert snapshot(official.parents[1]) == before


def test_what_is_not_there_is_refused(official: Path, target: Path, tmp_path: Path) -> None:
    """A folder that does not exist, and a file."""
    for path in (tmp_path / "none", official / "config.pbtxt"):
        with pytest.raises(UsageError, match="is not a folder"):
            read_adoption(path, target, TEMPLATE, "vllm_env")


@pytest.mark.parametrize("place", [".", "inside", "inside/deeper", "..", "../..", "link", "linked/inside"])
def test_a_target_that_is_source_or_around_it_is_refused(official: Path, place: str) -> None:
    """Also by a link, and if the target does not exist yet."""
    (official.parent / "link").symlink_to(official)
    target = official.parent / "link" if place == "link" else official / place
    before = snapshot(official.parents[1])
    with pytest.raises(VllmEnvError, match="one lies inside the other") as caught:
        read_adoption(official, target, TEMPLATE, "vllm_env")
    assert "--model-repository" in (caught.value.remedy or "")
    assert snapshot(official.parents[1]) == before


def _foreign(target: Path) -> None:
    target.mkdir(parents=True)
    (target / "config.pbtxt").write_text("")


def _of_another(target: Path) -> None:
    _foreign(target)
    (target / "vllm_env.json").write_text(manifest(target.parent / "another"))


def _built(target: Path) -> None:
    _of_another(target)
    document = json.loads((target / "vllm_env.json").read_text())
    del document["adopted_from"]
    (target / "vllm_env.json").write_text(json.dumps(document))


def _file(target: Path) -> None:
    target.parent.mkdir(parents=True)
    target.write_text("")


def _dangling(target: Path) -> None:
    target.parent.mkdir(parents=True)
    target.symlink_to("nowhere")


@pytest.mark.parametrize("change", [_foreign, _of_another, _built, _file, _dangling])
def test_a_target_that_was_not_adopted_from_source_is_refused(
    official: Path, target: Path, change: Callable[[Path], object]
) -> None:
    """Whatever it is: nobody knows whose files they are."""
    change(target)
    before = snapshot(official.parents[1])
    with pytest.raises(VllmEnvError, match=f"{target} exists, and its manifest does not say .* from {official}") as caught:
        read_adoption(official, target, TEMPLATE, "vllm_env")
    assert "--model" in (caught.value.remedy or "")
    assert snapshot(official.parents[1]) == before


@pytest.mark.parametrize("link", [False, True])
def test_the_template_is_no_target(official: Path, tmp_path: Path, link: bool) -> None:
    """Also by a link. Nobody is told to remove it, nor anything else that this program did not make."""
    template = tmp_path / "models" / "vllm"
    shutil.copytree(TEMPLATE, template)
    target = tmp_path / "link" if link else template
    if link:
        target.symlink_to(template)
    with pytest.raises(VllmEnvError, match=f"{target} exists") as caught:
        read_adoption(official, target, template, "vllm_env")
    assert "--model NEW" in (caught.value.remedy or "")
    assert "emove" not in str(caught.value.remedy)


def test_a_folder_named_as_the_template_needs_a_name(official: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a checkout the command would write the new model there."""
    source = official.rename(official.with_name("vllm"))
    assert main(["adopt", str(source), "--dry-run"]) == 1
    said = capsys.readouterr().err
    assert "--model NEW" in said
    assert "emove" not in said


def test_a_build_does_not_publish_beside_another_backends_configuration(official: Path) -> None:
    """It would not be served; the refusal names what adopts the model. Two files that differ are refused as well."""
    with pytest.raises(VllmEnvError, match='names the backend "vllm"') as caught:
        check_model_folder(official)
    assert f"./gen_vllm_env.sh adopt {official}" in caught.value.remedy
    (official / "config.pbtxt").write_text('backend: "python" # not "vllm"')
    check_model_folder(official)
    (official / "vllm_engine_args.json").write_text("{}")
    with pytest.raises(VllmEnvError, match=r"vllm_engine_args.json and .*1/model.json differ: enable_lora, model"):
        check_model_folder(official)
