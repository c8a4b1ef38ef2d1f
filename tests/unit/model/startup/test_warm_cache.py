"""Filled caches are used where they fit, never written, and the operator's own variables win."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
from pathlib import Path

import pytest

from support.fake_log import FakeLog
from triton_vllm.startup import warm_cache
from triton_vllm.startup.warm_cache import current, device_names, misfit, read, relocate, use

OLD = "/build/models/vllm/.vllm_env.staging-1/vllm_cache"


@pytest.fixture
def said():
    return FakeLog()


@pytest.fixture
def model(tmp_path):
    """A model's folder as the packager leaves it, without caches."""
    folder = tmp_path / "models" / "vllm"
    folder.mkdir(parents=True)
    (folder / "vllm_env.json").write_text(json.dumps({"lock_digest": "a" * 64}))
    (folder / "vllm_engine_args.json").write_text("{}")
    return folder


@pytest.fixture
def filled(model):
    """The same with caches that a warm run filled, by the model's own code, in a staging folder that is gone."""
    warming = model / ".vllm_env.staging-1" / "vllm_cache"
    use(model, {warm_cache.WARM_VARIABLE: str(warming)}, FakeLog())
    (warming / "modelinfos").mkdir()
    (warming / "modelinfos" / "opt.json").write_text("{}")
    warming.rename(model / "vllm_cache")
    warming.parent.rmdir()
    return model / "vllm_cache"


@pytest.fixture
def environment(tmp_path):
    """A process's variables as the environment's hook leaves them, with a user's cache folder of its own."""
    home = tmp_path / "home"
    return {"XDG_CACHE_HOME": str(home), "TORCHINDUCTOR_CACHE_DIR": f"{home}/vllm_env/inductor/{'0' * 16}"}


def change(filled, **fields):
    """Alter the record of filled caches."""
    made = dataclasses.asdict(read(filled)) | fields
    (filled / "warm.json").write_text(json.dumps(made))


def content(folder):
    """Every file with what it holds and when it was written."""
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def test_a_warm_run_fills_the_folder_that_it_is_told(model, environment, said, tmp_path):
    """Even over the operator's folders: what vLLM caches elsewhere would be missing later. The record says for what."""
    environment |= {warm_cache.WARM_VARIABLE: str(tmp_path / "new"), "VLLM_CACHE_ROOT": "/mine", "TRITON_CACHE_DIR": "/mine"}
    use(model, environment, said)
    root = str(tmp_path / "new")
    expected = {
        "VLLM_CACHE_ROOT": root,
        "TORCHINDUCTOR_CACHE_DIR": f"{root}/inductor",
        "TRITON_CACHE_DIR": f"{root}/triton",
    }
    assert environment.items() >= expected.items()
    made = read(tmp_path / "new")
    assert (made.root, made.environment, made.devices) == (root, "a" * 64, device_names())
    assert misfit(made, current(model)) == ""


def test_caches_that_fit_are_used_through_a_private_copy(filled, model, environment, said):
    """vLLM gets all three folders, in the user's cache folder, and the model's own are only read."""
    before = content(filled)
    use(model, environment, said)
    root = Path(environment["VLLM_CACHE_ROOT"])
    assert root.is_relative_to(environment["XDG_CACHE_HOME"])
    assert (root / "modelinfos" / "opt.json").read_text() == "{}"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == f"{root}/inductor"
    assert environment["TRITON_CACHE_DIR"] == f"{root}/triton"
    (root / "modelinfos" / "new.json").write_text("what vLLM adds")
    assert content(filled) == before
    assert (len(said.infos), said.warnings) == (1, [])


def test_a_read_only_repository_is_copied_into_folders_that_can_be_written(filled, model, environment, said):
    """Modes come from the repository; vLLM must be able to add files all the same."""
    (filled / "modelinfos").chmod(0o555)
    filled.chmod(0o555)
    use(model, environment, said)
    root = Path(environment["VLLM_CACHE_ROOT"])
    assert [oct(p.stat().st_mode & 0o777) for p in (root, root / "modelinfos")] == ["0o700", "0o700"]
    for folder in (filled, filled / "modelinfos"):
        folder.chmod(0o700)  # or only root could remove it


def test_where_home_cannot_be_written_the_copy_lies_in_a_folder_of_this_user_alone(
    filled, model, environment, said, tmp_path, monkeypatch
):
    """Below the folder for temporary files; one that others can write is refused, since vLLM unpickles what lies there."""
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    environment["XDG_CACHE_HOME"] = str(tmp_path / "file")
    use(model, first := dict(environment), said)
    place = Path(first["VLLM_CACHE_ROOT"]).parent
    assert place == tmp_path / "temporary" / f"vllm_env_warm_{os.getuid()}"
    assert said.warnings == []
    place.chmod(0o777)
    use(model, second := dict(environment), said)
    assert "VLLM_CACHE_ROOT" not in second
    assert len(said.warnings) == 1
    assert "not this user's alone" in said.warnings[0]


def test_the_operators_root_wins(filled, model, environment, said):
    """VLLM_CACHE_ROOT is the choice of where caches lie: nothing is changed, and the log says so."""
    environment["VLLM_CACHE_ROOT"] = "/mine"
    before = dict(environment)
    use(model, environment, said)
    assert environment == before
    assert "VLLM_CACHE_ROOT=/mine is set" in said.infos[0]


def test_the_operators_other_folders_win(filled, model, environment, said):
    """The hook's default is replaced, a folder that somebody chose is not."""
    environment |= {"TORCHINDUCTOR_CACHE_DIR": "/mine/inductor", "TRITON_CACHE_DIR": "/mine/triton"}
    use(model, environment, said)
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == "/mine/inductor"
    assert environment["TRITON_CACHE_DIR"] == "/mine/triton"
    assert "VLLM_CACHE_ROOT" in environment


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("environment", "b" * 64, "b" * 16), ("vllm", "0.1.0", "0.1.0"), ("devices", ["NVIDIA H100"], "NVIDIA H100")],
)
def test_caches_of_something_else_are_ignored_with_one_warning(filled, model, environment, said, field, value, named):
    """Of another environment, vLLM or device: the start is as without them, and the warning says why and what to do."""
    change(filled, **{field: value})
    before = dict(environment)
    use(model, environment, said)
    assert environment == before
    assert len(said.warnings) == 1
    assert named in said.warnings[0]
    assert "--warm" in said.warnings[0]


def test_other_engine_arguments_are_told_and_the_caches_used(filled, model, environment, said):
    """vLLM keys what it compiles; much stays valid when only, say, the number of sequences changes."""
    (model / "vllm_engine_args.json").write_text('{"max_num_seqs": 8}')
    use(model, environment, said)
    assert "VLLM_CACHE_ROOT" in environment
    assert "other engine arguments" in said.infos[0]


@pytest.mark.parametrize("text", ["{", '{"unknown": 1}', "[]", None])
def test_a_record_that_cannot_be_read_fails_no_load(filled, model, environment, said, text):
    """Damaged, of another format, or missing: ignored with one warning."""
    (filled / "warm.json").unlink()
    if text is not None:
        (filled / "warm.json").write_text(text)
    use(model, environment, said)
    assert "VLLM_CACHE_ROOT" not in environment
    assert len(said.warnings) == 1


def test_paths_of_the_folder_that_was_filled_are_replaced(tmp_path):
    """In vLLM's index (as 0.22 writes it) and in Triton's groups; strings that only begin alike stay."""
    index = tmp_path / "torch_compile_cache/1a/rank_0_0/backbone/vllm_compile_cache.py"
    group = tmp_path / "triton/KEY/__grp__kernel.json"
    for file in (index, group):
        file.parent.mkdir(parents=True)
    key = ((1, 2048), 0, "inductor_standalone")
    index.write_text(repr({key: {"graph_handle": ("name", f"{OLD}/torch_compile_cache/x y"), "cache_key": "ab"}}))
    group.write_text(json.dumps({"child_paths": {"a.cubin": f"{OLD}/triton/KEY/a.cubin", "b": f"{OLD}er/b"}}))
    relocate(tmp_path, OLD, "/new")
    moved = ast.literal_eval(index.read_text())
    assert moved == {key: {"graph_handle": ("name", "/new/torch_compile_cache/x y"), "cache_key": "ab"}}
    assert json.loads(group.read_text()) == {"child_paths": {"a.cubin": "/new/triton/KEY/a.cubin", "b": f"{OLD}er/b"}}


def test_an_index_that_cannot_be_read_is_removed(tmp_path):
    """vLLM parses it without a guard, so it would end every start."""
    index = tmp_path / "vllm_compile_cache.py"
    index.write_text("{(1,")
    relocate(tmp_path, OLD, "/new")
    assert not index.exists()


def test_gpus_are_named_once_each_and_else_the_processor(tmp_path, monkeypatch):
    """As /proc has them: two of a kind are one name, and without a driver it is the processor's."""
    for number, name in enumerate(("NVIDIA H200", "NVIDIA H200", "NVIDIA L4")):
        folder = tmp_path / "gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 11\n")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Xeon\nprocessor\t: 1\nmodel name\t: Xeon\n")
    monkeypatch.setattr(warm_cache, "_CPU_FILE", tmp_path / "cpuinfo")
    monkeypatch.setattr(warm_cache, "_GPUS_FOLDER", tmp_path / "gpus")
    assert device_names() == ("NVIDIA H200", "NVIDIA L4")
    monkeypatch.setattr(warm_cache, "_GPUS_FOLDER", tmp_path / "none")
    assert device_names() == ("Xeon",)
