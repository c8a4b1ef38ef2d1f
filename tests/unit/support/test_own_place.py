"""What a run of the tests works on: a copy of the checkout as a clone has it, and caches filled from the user's."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from support import own_place

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which somebody has built a model."""
    folder = tmp_path / "mine"
    for name in ("README.md", "tests/test_new.py", "model_repository/vllm/config.pbtxt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / ".gitignore").write_text(
        "/model_repository/*/vllm_env.tar.gz\n/model_repository/*/vllm_engine_args.json\n/.triton/\n"
    )
    for name in ("model_repository/vllm/vllm_env.tar.gz", "model_repository/vllm/vllm_engine_args.json", ".triton/RELEASE"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("built")
    return folder


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home with a cache."""
    home = tmp_path / "user"
    for name in (
        ".cache/vllm_env/prefixes/k/env/bin/python",
        ".cache/vllm_env/prefixes/k/.complete",
        ".cache/vllm_env/build/left",
        ".config/pip/pip.conf",
    ):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CACHE_HOME", "VLLM_ENV_CACHE", "UV_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return home


def prepare(checkout: Path, data: Path) -> None:
    """Prepare the first copy."""
    own_place.prepare(checkout, data, data / "checkout")


def names(folder: Path) -> set[str]:
    """Return the files below a folder, without those of git."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or path.is_symlink()}
    return {name for name in found if not name.startswith(".git/")}


@pytest.mark.parametrize("in_git", [True, False])
@pytest.mark.usefixtures("user")
def test_the_copy_is_what_a_clone_has(checkout: Path, tmp_path: Path, in_git: bool) -> None:
    """With what is not committed yet, without what is built; what the checkout no longer has goes at the next run."""
    if in_git:
        subprocess.run(["git", "-C", checkout, "init", "--quiet"], check=True)
    prepare(checkout, tmp_path / "data")
    copy = tmp_path / "data" / "checkout"
    sources = {".gitignore", "README.md", "tests/test_new.py", "model_repository/vllm/config.pbtxt"}
    assert names(copy) == {*sources, ".triton/RELEASE", ".tools"}
    (checkout / "tests/test_new.py").unlink()
    (checkout / "README.md").write_text("another text")
    (copy / "model_repository/vllm/vllm_env.tar.gz").write_text("a test's")
    prepare(checkout, tmp_path / "data")
    assert names(copy) == {*sources - {"tests/test_new.py"}, ".triton/RELEASE", ".tools"}
    assert (copy / "README.md").read_text() == "another text"
    (checkout / "model_repository/vllm/config.pbtxt").write_text('"$$TRITON_MODEL_DIRECTORY/vllm_env"')
    prepare(checkout, tmp_path / "data")
    assert (copy / "model_repository/vllm/config.pbtxt").read_text() == '"$$TRITON_MODEL_DIRECTORY/vllm_env.tar.gz"'
    tracked = subprocess.check_output(["git", "-C", copy, "ls-files"], text=True).splitlines()
    assert set(tracked) == sources - {"tests/test_new.py"}
    assert subprocess.check_output(["git", "-C", copy, "status", "--porcelain"], text=True) == ""


@pytest.mark.usefixtures("user")
def test_bytecode_stays_as_long_as_its_source(checkout: Path, tmp_path: Path) -> None:
    """Compiling all tests takes a run's every worker seconds."""
    prepare(checkout, tmp_path / "data")
    kept = tmp_path / "data/checkout/tests/__pycache__"
    kept.mkdir()
    for name in ("test_new.cpython-311-pytest-9.0.pyc", "test_old.cpython-311.pyc"):
        (kept / name).touch()
    prepare(checkout, tmp_path / "data")
    assert [path.name for path in kept.iterdir()] == ["test_new.cpython-311-pytest-9.0.pyc"]
    (checkout / "tests/test_new.py").unlink()
    prepare(checkout, tmp_path / "data")
    assert not kept.parent.exists()


@pytest.mark.usefixtures("user")
def test_the_tests_own_triton_stays_unless_the_user_has_another(checkout: Path, tmp_path: Path) -> None:
    """It was provisioned by an earlier run, which takes seconds."""
    prepare(checkout, tmp_path / "data")
    (checkout / ".triton" / "RELEASE").unlink()
    prepare(checkout, tmp_path / "data")
    assert (tmp_path / "data/checkout/.triton/RELEASE").read_text() == "built"
    (checkout / ".triton" / "RELEASE").write_text("another")
    prepare(checkout, tmp_path / "data")
    assert (tmp_path / "data/checkout/.triton/RELEASE").read_text() == "another"


@pytest.mark.usefixtures("user")
def test_a_file_may_become_a_folder_and_the_other_way_round(checkout: Path, tmp_path: Path) -> None:
    """As when another branch is checked out."""
    prepare(checkout, tmp_path / "data")
    (checkout / "README.md").unlink()
    (checkout / "README.md").mkdir()
    (checkout / "README.md" / "page.md").write_text("")
    (checkout / "tests" / "test_new.py").unlink()
    (checkout / "tests").rmdir()
    (checkout / "tests").write_text("")
    prepare(checkout, tmp_path / "data")
    assert names(tmp_path / "data" / "checkout") >= {"README.md/page.md", "tests"}


def test_a_hook_of_git_does_not_lead_into_the_users_repository(
    checkout: Path, user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git gives its hooks GIT_DIR, which goes before ``-C``."""
    subprocess.run(["git", "-C", checkout, "init", "--quiet"], check=True)
    monkeypatch.setenv("GIT_DIR", str(checkout / ".git"))
    for _ in range(2):
        prepare(checkout, tmp_path / "data")
        (checkout / "README.md").write_text("changed")
    monkeypatch.delenv("GIT_DIR")
    told = subprocess.run(["git", "-C", checkout, "log"], check=False, capture_output=True, text=True)
    assert "as tested" not in told.stdout
    assert (tmp_path / "data/checkout/.git").is_dir()


@pytest.mark.parametrize("can_link", [True, False])
def test_the_cache_is_filled_from_the_users(
    checkout: Path, user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_link: bool
) -> None:
    """By links or copies; what a build stages is not taken over, and what the own cache has stays."""
    if not can_link:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "cp").write_text('#!/bin/sh\n[ "$2" = --link ] && exit 1\nexec /bin/cp "$@"\n')
        (tmp_path / "bin" / "cp").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    prepare(checkout, tmp_path / "data")
    theirs = user / ".cache/vllm_env/prefixes/k"
    ours = tmp_path / "data/home/.cache/vllm_env/prefixes/k"
    assert (ours / "env/bin/python").read_text() == (theirs / "env/bin/python").read_text()
    assert (ours / "env/bin/python").samefile(theirs / "env/bin/python") == can_link
    assert not (ours / ".complete").samefile(theirs / ".complete")  # its time is that of the last use
    assert not (tmp_path / "data/home/.cache/vllm_env/build").exists()
    assert (tmp_path / "data/home/.config/pip/pip.conf").read_text() == ".config/pip/pip.conf"
    (theirs / "env/bin/python").unlink()
    prepare(checkout, tmp_path / "data")
    assert (ours / "env/bin/python").exists()


@pytest.mark.usefixtures("user")
def test_what_cannot_be_copied_is_not_taken_over_by_half(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when another build evicts it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cp").write_text('#!/bin/sh\ncase "$*" in */env\\ *) exit 1; esac\nexec /bin/cp "$@"\n')
    (tmp_path / "bin" / "cp").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    prepare(checkout, tmp_path / "data")
    assert list((tmp_path / "data/home/.cache/vllm_env/prefixes").iterdir()) == []
    assert "is not taken over" in capsys.readouterr().err


@pytest.mark.usefixtures("user")
def test_a_second_run_has_a_copy_of_its_own(checkout: Path, tmp_path: Path) -> None:
    """Else it would change files under the first one; its command runs in the copy, with a home that is not the user's."""
    (tmp_path / "data").mkdir()
    command = [
        sys.executable,
        own_place.__file__,
        str(checkout),
        str(tmp_path / "data"),
        "sh",
        "-c",
        "pwd; echo $HOME; read line",
    ]
    with ExitStack() as stack:
        runs = []
        for _ in range(2):
            run = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            assert run.stdout
            runs.append((run.stdout.readline().strip(), run.stdout.readline().strip()))
    data = (tmp_path / "data").resolve()
    assert runs == [(f"{data}/checkout", f"{data}/home"), (f"{data}/checkout-2", f"{data}/home")]


@pytest.mark.usefixtures("user")
def test_a_checkout_in_a_strange_path_is_tested_there(checkout: Path, tmp_path: Path) -> None:
    """The product must work in it. All else is in the given folder: Triton uses no environment in such a path."""
    strange = checkout.rename(tmp_path / "with space")
    command = [sys.executable, own_place.__file__, str(strange), str(tmp_path / "data"), "sh", "-c", "pwd; echo $HOME"]
    copy, home = subprocess.check_output(command, text=True).splitlines()
    assert copy == str(strange.resolve() / ".tools/test-data/checkout")
    assert home == str((tmp_path / "data").resolve() / "home")
    assert (strange / ".tools/test-data/checkout/README.md").is_file()


def test_variables_that_lead_to_the_users_files_are_left_out(tmp_path: Path) -> None:
    """Those of the tests themselves, and where certificates are, stay."""
    given = {"HF_HOME": "/h", "VLLM_ENV_CACHE": "/c", "XDG_CACHE_HOME": "/x", "VLLM_ENV_TEST_TRITON_ROOT": "/t", "PATH": "/bin"}
    kept = own_place.own_variables(
        {**given, "GIT_DIR": "/g", "GIT_SSL_CAINFO": "/s", "PYTHONDONTWRITEBYTECODE": "1"}, tmp_path, tmp_path
    )
    assert not {"HF_HOME", "VLLM_ENV_CACHE", "XDG_CACHE_HOME", "GIT_DIR", "PYTHONDONTWRITEBYTECODE"} & kept.keys()
    assert (kept["PATH"], kept["VLLM_ENV_TEST_TRITON_ROOT"], kept["GIT_SSL_CAINFO"]) == ("/bin", "/t", "/s")
    assert kept["HOME"] == str(tmp_path / "home")
