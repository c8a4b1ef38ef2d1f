"""The bootstrap, as a user runs it: in a checkout whose lock is one small wheel, with a program in the packager's place."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pip
import pytest

import bootstrap
from support.bootstrap_place import Place
from support.patience import LIMIT, wait_for
from support.repositories import CHECKOUT
from vllm_env.base.filesystem import owner_of
from vllm_env.base.network import parse_pip_config

if TYPE_CHECKING:
    from collections.abc import Iterator

_OTHER = 12345
_DEBIAN = Path("/usr/bin/python3")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def open_place() -> Iterator[Place]:
    """One that another user can reach; pytest's own folder is closed to others."""
    if os.geteuid() != 0 or not _DEBIAN.exists():
        pytest.skip("only root becomes another user, who needs an interpreter outside root's home")
    folder = Path(tempfile.mkdtemp(prefix="vllm_env_test_"))
    folder.chmod(0o755)
    made = Place(folder)
    made.env |= {"PYTHON": str(_DEBIAN), "HOME": "/"}
    yield made
    shutil.rmtree(folder)


_AS_OTHER = ("setpriv", f"--reuid={_OTHER}", f"--regid={_OTHER}", "--clear-groups")


def test_help_and_misspelt_words_install_nothing(place: Place) -> None:
    """No .tools, nothing in the home, and no bytecode in the checkout."""
    before = sorted(place.root.rglob("*"))
    for arguments, status, said in (
        (["--help"], 0, "--help-all"),
        (["--help-all"], 0, "--wheelhouse DIR"),
        (["help", "clean"], 0, "--keep-cache"),
        (["-h"], 0, "usage: gen_vllm_env.sh"),
        (["--version"], 0, "vllm-env "),
        (["wheelhouse", "--help"], 0, "usage: gen_vllm_env.sh wheelhouse"),
        (["clean", "-h"], 0, "--keep-cache"),
        (["--hepl"], 2, "Did you mean --help?"),
        (["verfiy"], 2, "Did you mean verify?"),
        (["--layout", "zip"], 2, "See gen_vllm_env.sh --help-all."),
    ):
        code, out, err = place.run(*arguments)
        assert code == status, arguments
        assert said in (err if status else out)
    assert sorted(place.root.rglob("*")) == before
    assert list(Path(place.env["HOME"]).iterdir()) == []


@pytest.mark.parametrize("python", ["an older one", "none"])
def test_an_interpreter_that_is_too_old_is_refused_with_the_remedy(place: Place, tmp_path: Path, python: str) -> None:
    """By the script itself, which such an interpreter could not read the packager with."""
    given = tmp_path / "python"
    if python == "an older one":
        given.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "import sys; sys.version_info = (3, 9); $2"\n')
        given.chmod(0o755)
    code, out, err = place.run("--help", PYTHON=str(given))
    assert (code, out) == (1, "")
    fault = "is not Python 3.10 or newer" if given.exists() else "does not exist or is not executable"
    assert f"error: {given} {fault}." in err
    assert "PYTHON=/path/to/python3" in err


def test_another_shell_starts_bash(place: Place) -> None:
    """As in `sh gen_vllm_env.sh`: dash has no pipefail."""
    dash = shutil.which("dash")
    if not dash:
        pytest.skip("no dash")
    argv = [dash, "gen_vllm_env.sh", "--version"]
    assert subprocess.check_output(argv, cwd=place.root, env=place.env, text=True).startswith("vllm-env ")


def test_another_architecture_is_refused_before_anything_is_made(place: Place) -> None:
    """In one sentence."""
    code, _, err = place.run(before=("setarch", "i686"))
    assert (code, err.splitlines()[0]) == (
        1,
        "error: This machine is i686; environments are built on Linux for x86_64 and aarch64 only.",
    )
    assert not place.tools.exists()


def test_it_becomes_the_packager_and_makes_its_tools_once(place: Place) -> None:
    """The arguments arrive, pip's variables count, and the second run says nothing."""
    code, out, err = place.run("build", "--model", "with space")
    assert code == 0, err
    (folder,) = place.environments()
    assert out == f'["1.0", "{folder}", ["build", "--model", "with space"], null]\n'
    assert err.startswith(f"tools      … into {folder}\n")
    assert place.run() == (0, f'["1.0", "{folder}", [], null]\n', "")
    place.lock("2.0")
    assert place.run("--quiet")[1:] == (f'["2.0", "{place.environments()[0]}", ["--quiet"], null]\n', "")


def test_pips_configuration_of_the_interpreter_counts(place: Place) -> None:
    """pip.conf beside the interpreter that runs the bootstrap, which a virtual environment would not see."""
    for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONFIG_FILE"):
        del place.env[name]
    python = _with_pip(place)
    (python.parents[1] / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {place.wheels}\n")
    code, _, err = place.run(PYTHON=str(python))
    assert code == 0, err


def test_uv_installs_what_the_lock_has_beside_it(place: Place) -> None:
    """From where pip is configured to take it, with the same digests; pip itself installs uv alone."""
    del place.env["PIP_NO_INDEX"], place.env["PIP_CONFIG_FILE"]
    configured = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    links = f"{_find_links()} {place.wheels}"
    place.env |= {**configured, "PIP_FIND_LINKS": links}
    # Each of these alone would make uv fail, or install to another place.
    (place.root.parent / "constraint").write_text("tool<1\n")
    place.env |= {"UV_CONSTRAINT": str(place.root.parent / "constraint"), "UV_NO_BINARY": "1"}
    place.env |= {"UV_PYTHON": "/no/such/python", "UV_EXCLUDE_NEWER": "2001-01-01"}
    lock = place.root / "env/requirements.txt"
    tool = lock.read_text()
    lock.write_text(tool + bootstrap.entry_of("uv", CHECKOUT / "env/requirements.txt"))
    code, out, err = place.run()
    assert (code, out[:6]) == (0, '["1.0"'), err
    installers = {path.parent.name: path.read_text().strip() for path in place.tools.glob("venv*/lib/*/*/*/INSTALLER")}
    assert installers.pop("tool-1.0.dist-info") == "uv"
    assert [(name[:3], installer) for name, installer in installers.items()] == [("uv-", "pip")]
    # Another file than the lock's is refused, as by pip.
    lock.write_text(tool.replace(tool[-65:-1], "0" * 64) + bootstrap.entry_of("uv", CHECKOUT / "env/requirements.txt"))
    code, _, err = place.run()
    assert code == 1
    assert "ash mismatch" in err


def _find_links() -> str:
    """The folders of wheels that this machine's pip is configured with."""
    listing = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    return " ".join(parse_pip_config(listing).find_links)


def _bare(place: Place) -> Path:
    """An interpreter without pip, but with ensurepip."""
    folder = place.root.parent / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin/python"


def _with_pip(place: Place) -> Path:
    """An interpreter with a folder of its own and the pip of this one, which starts sooner than that of ensurepip."""
    python = _bare(place)
    (packages,) = python.parents[1].glob("lib/python3.*/site-packages")
    (packages / "pip").symlink_to(Path(pip.__file__).parent)
    return python


def test_neither_pip_nor_ensurepip_is_said_with_the_packages_name(place: Place, tmp_path: Path) -> None:
    """Without pip, ensurepip's is used; without both, nothing half-made passes for whole at the next run.

    ensurepip imports nothing of the current folder either.
    """
    python = _bare(place)
    (tmp_path / "debian").mkdir()
    (tmp_path / "debian/ensurepip.py").write_text("raise SystemExit('ensurepip is disabled in Debian')\n")
    code, _, err = place.run(PYTHON=str(python), PYTHONPATH=str(tmp_path / "debian"))
    assert code == 1
    assert "error: Could not get a pip" in err
    assert "apt-get install python3-pip" in err
    _fill_current_folder(place)
    code, out, err = place.run("--model", "x", PYTHON=str(python), PIP_FIND_LINKS="../wheels")
    assert (code, out[:6]) == (0, '["1.0"'), err


def test_no_variable_leads_the_tools_elsewhere(place: Place, tmp_path: Path) -> None:
    """What a user has set for installations of their own; each of these alone would."""
    (tmp_path / "constraint").write_text("tool<1\n")
    values = {"DRY_RUN": "1", "PYTHON": sys.executable, "CONSTRAINT": str(tmp_path / "constraint")}
    values |= dict.fromkeys(("TARGET", "PREFIX", "ROOT"), str(tmp_path / "elsewhere"))
    variables: dict[str, Any] = {f"PIP_{name}": value for name, value in values.items()}
    code, out, err = place.run(**variables)
    assert (code, out[:6]) == (0, '["1.0"'), err
    assert not (tmp_path / "elsewhere").exists()


def test_tools_that_pip_put_elsewhere_are_no_tools(place: Place, tmp_path: Path) -> None:
    """pip.conf has a target: the error says where the fault is, and the next run without it makes them."""
    (tmp_path / "pip.conf").write_text(f"[install]\ntarget = {tmp_path / 'elsewhere'}\n")
    code, out, err = place.run(PIP_CONFIG_FILE=str(tmp_path / "pip.conf"))
    assert (code, out) == (1, ""), err
    assert "has not put tool into" in err
    assert "pip config list" in err.splitlines()[-1]
    code, out, err = place.run()
    assert (code, out[:6]) == (0, '["1.0"'), err


def _fill_current_folder(place: Place) -> None:
    """Let the next runs start in a folder with modules that nobody may import."""
    place.cwd = place.root.parent / "cwd"
    place.cwd.mkdir()
    for name in ("tool", "json", "runpy", "typing", "queue", "shutil", "logging", "tempfile"):
        (place.cwd / f"{name}.py").write_text("raise SystemExit(f'{__file__} was imported')\n")


def test_files_of_the_current_folder_are_not_imported(place: Place) -> None:
    """Neither by the packager, nor by venv and pip; a relative folder of wheels counts from there as ever."""
    _fill_current_folder(place)
    code, out, err = place.run("--model", "x", PIP_FIND_LINKS="../wheels")
    assert (code, out[:6]) == (0, '["1.0"'), err


def test_a_network_that_fails_is_called_that(place: Place) -> None:
    """An index at a port where nobody listens."""
    place.env |= {"PIP_NO_INDEX": "0", "PIP_RETRIES": "1", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "no_proxy": "*"}
    del place.env["PIP_FIND_LINKS"]
    code, _, err = place.run()
    assert code == 1
    assert "the network failed" in err
    assert "pip config list" in err.splitlines()[-1]


def test_the_script_finds_its_checkout_through_a_link_and_with_cdpath(place: Place, tmp_path: Path) -> None:
    """A link in ~/bin, and a relative path that CDPATH could lead elsewhere."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/link").symlink_to(place.root / "gen_vllm_env.sh")
    (tmp_path / "astray/checkout").mkdir(parents=True)
    for command in (tmp_path / "bin/link", "checkout/gen_vllm_env.sh"):
        argv = ["bash", command, "--version"]
        variables = {**place.env, "CDPATH": str(tmp_path / "astray")}
        assert "vllm-env " in subprocess.check_output(argv, env=variables, cwd=tmp_path, text=True)


@pytest.mark.skipif(not _DEBIAN.exists(), reason="there is no second interpreter")
def test_two_interpreters_share_a_checkout(place: Place) -> None:
    """Each has its environment, and none makes the other's again."""
    for expected in ("tools", ""):
        for python in (sys.executable, str(_DEBIAN)):
            code, _, err = place.run(PYTHON=python)
            assert (code, err[:5]) == (0, expected)
    assert len(place.environments()) == 2


def test_two_builds_at_once_make_the_tools_once(place: Place) -> None:
    """The other one waits and then has them."""
    children = [place.start() for _ in range(2)]
    ended = [child.communicate(timeout=600) for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert sum(err.count("into ") for _, err in ended) == 1


def test_what_a_killed_run_left_is_made_again(place: Place) -> None:
    """Killed while pip installs: the environment is there, and not whole."""
    gate = place.root / "pip.conf"
    os.mkfifo(gate)  # where pip stops to read
    child = place.start(PIP_CONFIG_FILE=str(gate))
    wait_for(
        lambda: any(p.read_text().endswith("unfinished\n") for p in place.tools.glob("venv*/.stamp")),
        "an environment without packages",
    )
    child.send_signal(signal.SIGKILL)
    opened = os.open(gate, os.O_RDWR)
    gate.unlink()
    gate.touch()  # for a pip that has not come to it
    os.close(opened)
    child.communicate()
    code, out, err = place.run()
    assert (code, out[:6], err[:5]) == (0, '["1.0"', "tools")
    assert len(place.environments()) == 1


def test_outdated_tools_go_unless_somebody_runs_in_them(place: Place) -> None:
    """After a new lock, and those of an older bootstrap, too; another interpreter's stay."""
    running = place.start()
    assert running.stdout
    running.stdout.readline()
    (old,) = place.environments()
    for name, line in {"venv": f"{sys.executable} {sys.version.split()[0]} {'0' * 64}\n", "venv-x": "/other 3.99.0 0\n"}.items():
        (place.tools / name).mkdir()
        (place.tools / name / ".stamp").write_text(line)
    place.lock("2.0")
    assert place.run()[0] == 0
    names = {folder.name for folder in place.environments()}
    assert len(names) == 3
    assert {old.name, "venv-x"} < names
    running.communicate(timeout=LIMIT)
    place.lock("3.0")
    code, out, _ = place.run()
    assert (code, out[:6]) == (0, '["3.0"')
    assert len(place.environments()) == 2


def test_offline_takes_the_tools_from_the_wheelhouse(place: Place, tmp_path: Path) -> None:
    """Whatever pip is configured with; without them the message says what is missing and what to do."""
    house = tmp_path / "my house"
    house.mkdir()
    astray: dict[str, Any] = {"PIP_FIND_LINKS": "https://192.0.2.1/", "PIP_INDEX_URL": "https://192.0.2.1/simple"}
    code, _, err = place.run("--offline", **astray)
    assert (code, "No --wheelhouse was given" in err, "wheelhouse DIR" in err) == (1, True, True)
    code, _, err = place.run("--offline", "--wheelhouse", str(house), **astray)
    assert (code, f"{house} has no folder tools" in err) == (1, True)
    assert not place.tools.exists()
    place.wheels.rename(house / "tools")
    code, out, err = place.run("--offline", "--wheelhouse", str(house), **astray)
    assert (code, out[:6]) == (0, '["1.0"'), err
    assert place.run("--offline")[0] == 0


def test_a_wheelhouse_of_another_python_is_told(place: Place, tmp_path: Path) -> None:
    """A folder without a wheel that fits: which Python would, and how to name it; no configuration adds another place."""
    (tmp_path / "house/tools").mkdir(parents=True)
    python = _with_pip(place)
    (python.parents[1] / "pip.conf").write_text(f"[global]\nfind-links = {place.wheels}\n")
    del place.env["PIP_CONFIG_FILE"]
    code, _, err = place.run("--wheelhouse", str(tmp_path / "house"), PYTHON=str(python))
    assert code == 1
    assert "No matching distribution found for tool==1.0" in err
    assert "PYTHON=python3.X" in err.splitlines()[-1]


def _chown_tree(folder: Path, uid: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, uid, uid, follow_symlinks=False)


def test_all_that_root_makes_is_the_checkouts_owners(open_place: Place) -> None:
    """As in a container with a user's checkout mounted: tools, their lock, and no bytecode of root's."""
    _chown_tree(open_place.root, _OTHER)
    code, _, err = open_place.run(HOME="/root")
    assert code == 0, err
    assert {owner_of(path).uid for path in open_place.root.rglob("*")} == {_OTHER}
    open_place.lock("2.0")
    assert open_place.run(before=_AS_OTHER)[0] == 0
    assert len(open_place.environments()) == 1


def test_a_user_without_a_home_has_tools_and_caches_in_the_checkout(open_place: Place) -> None:
    """HOME=/, as in a container that does not know the user."""
    _chown_tree(open_place.root, _OTHER)
    code, out, err = open_place.run(before=_AS_OTHER)
    assert (code, f'"{open_place.tools}/cache"]' in out) == (0, True), err
    del open_place.env["HOME"]
    assert open_place.run(before=_AS_OTHER)[:2] == (0, out)


def test_a_checkout_that_cannot_be_written_has_its_tools_in_the_cache(open_place: Place) -> None:
    """Where neither can be written, one error says how to name a cache."""
    code, _, err = open_place.run(before=_AS_OTHER)
    assert (code, err.splitlines()) == (
        1,
        [
            f"error: The cache folder /.cache/vllm_env cannot be written by user {_OTHER}.",
            "  fix: Name a folder that can be written: VLLM_ENV_CACHE=DIR.",
        ],
    )
    cache = open_place.root.parent / "cache"
    cache.mkdir()
    os.chown(cache, _OTHER, _OTHER)
    code, out, err = open_place.run(before=_AS_OTHER, VLLM_ENV_CACHE=str(cache))
    assert (code, f'"{cache}/tools/venv-3' in out, f'"{cache}"]' in out) == (0, True, True), err
    assert open_place.run(HOME="/root")[0] == 0  # root makes the checkout's own
    assert f'"{open_place.tools}/venv-3' in open_place.run(before=_AS_OTHER, VLLM_ENV_CACHE=str(cache))[1]


def test_pip_of_ubuntu_22_04_is_enough(place: Place) -> None:
    """The oldest that it must do with: 22.0.2 has no --python."""
    python = _bare(place)
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, "pip==22.0.2"], check=True)
    code, out, err = place.run(PYTHON=str(python))
    assert (code, out[:6]) == (0, '["1.0"'), err
    argv: list[str | Path] = [python, "-m", "pip", "--python", python, "list"]
    assert "no such option: --python" in subprocess.run(argv, capture_output=True, text=True, check=False).stderr


def test_ctrl_c_before_the_bootstrap_runs(place: Place, tmp_path: Path) -> None:
    """Python starts and imports for 0.2 s. A Ctrl-C meanwhile ends the command with 130 and without a traceback."""
    impatient = tmp_path / "python"
    impatient.write_text(f'#!/bin/bash\n[[ $1 != -B ]] || kill -INT $$\nexec "{sys.executable}" "$@"\n')
    impatient.chmod(0o755)
    assert place.run("--version", PYTHON=str(impatient)) == (130, "", "")


def test_ctrl_c_while_the_bootstrap_imports(place: Place, tmp_path: Path) -> None:
    """In the middle of an import, as a module of that name sends it."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "argparse.py").write_text(
        "import os, signal, sys\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.path.remove(os.path.dirname(__file__))\n"
        "del sys.modules['argparse']\n"
        "import argparse\n"
    )
    assert place.run("--version", PYTHONPATH=str(tmp_path / "modules")) == (130, "", "")
