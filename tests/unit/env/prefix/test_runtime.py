"""The environment without activation: a real interpreter in a prefix with the hook, started as Triton starts it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import LIMIT, pause, wait_for
from triton_vllm.base.processes import process_space
from vllm_env.base.machine import AMD64, ARM64
from vllm_env.prefix.relocate import _GUARD, _install_guard, install_runtime, site_packages

_ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}  # as in the stub: nothing mends the locale


@pytest.fixture(scope="module")
def prefix(bare_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix with the hook, which was made elsewhere."""
    built = tmp_path_factory.mktemp("built") / "env"
    shutil.copytree(bare_prefix, built, symlinks=True)
    install_runtime(built, "a" * 64)
    moved = tmp_path_factory.mktemp("moved") / "env"
    built.rename(moved)
    return moved


def _start(prefix: Path, code: str, **variables: str) -> subprocess.Popen[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/root", **variables}
    return subprocess.Popen(
        [prefix / "bin/python", "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _run(prefix: Path, code: str, **variables: str) -> str:
    child = _start(prefix, code, **variables)
    output, _ = child.communicate(timeout=300)
    assert child.returncode == 0, output
    return output.strip()


def _lives(pid: int) -> bool:
    """Whether a process is there and no zombie: an orphan's belongs to init, which may take its time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _environ(prefix: Path, **variables: str) -> dict[str, str]:
    return dict(json.loads(_run(prefix, "import json, os; print(json.dumps(dict(os.environ)))", **variables)))


def test_files_are_utf8_in_the_c_locale(prefix: Path, tmp_path: Path) -> None:
    """open() without an encoding decodes ASCII in the stub, and `import torch` dies of it: the hook mends that."""
    (tmp_path / "text").write_bytes("naïve €".encode())
    code = f"print(ascii(open({str(tmp_path / 'text')!r}).read()))"
    assert _run(prefix, code, **_ASCII) == ascii("naïve €")


def test_without_the_hook_it_would_fail(bare_prefix: Path, tmp_path: Path) -> None:
    """The case is real: the same interpreter without the hook cannot read that file."""
    (tmp_path / "text").write_bytes("naïve €".encode())
    child = _start(bare_prefix, f"open({str(tmp_path / 'text')!r}).read()", **_ASCII)
    output, _ = child.communicate()
    assert "UnicodeDecodeError" in output


_SAY = r"""
import os, sys
print("out \u2014", flush=True)
print("err \u2014 \udcff", file=sys.stderr, flush=True)
if os.fork() == 0:
    print("fork \u2014", flush=True)
    os._exit(0)
os.wait()
"""


def test_what_is_printed_is_utf8(prefix: Path, bare_prefix: Path) -> None:
    """vLLM logs dashes, also from the EngineCore that it forks on a GPU; without the hook such lines end in a traceback."""
    assert _run(prefix, _SAY, **_ASCII).splitlines() == ["out \u2014", "err \u2014 \\udcff", "fork \u2014"]
    output, _ = _start(bare_prefix, _SAY, **_ASCII).communicate()
    assert "UnicodeEncodeError" in output


@pytest.mark.parametrize("form", ["{}", "{}/", "{}:/nonexistent", "../{.name}"])
def test_pythonpath_does_not_leak_in(prefix: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the server's or the user's PYTHONPATH does not shadow the pinned one, however it is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numpy.py").write_text("raise SystemExit('leaked')")
    code = "import importlib.util, os; print(importlib.util.find_spec('numpy'), os.environ.get('PYTHONPATH'))"
    code = "import sys; sys.path.remove('') if '' in sys.path else None\n" + code
    assert _run(prefix, code, PYTHONPATH=form.format(tmp_path)) == "None None"


def test_the_users_site_does_not_leak_in(prefix: Path, tmp_path: Path) -> None:
    """Packages in ~/.local are not those of the lock."""
    site = tmp_path / ".local/lib/python3.11/site-packages"
    site.mkdir(parents=True)
    (site / "leaked.py").touch()
    code = "import importlib.util; print(importlib.util.find_spec('leaked'))"
    assert _run(prefix, code, HOME=str(tmp_path)) == "None"


def test_an_environment_below_the_home_folder_keeps_its_own_packages(prefix: Path, tmp_path: Path) -> None:
    """An environment that is unpacked below ~/.local/lib is not taken for the user's site."""
    home = tmp_path / "home"
    (home / ".local/lib").mkdir(parents=True)
    (home / ".local/lib/env").symlink_to(prefix)
    code = "import _vllm_env_runtime; print('own')"
    assert _run(home / ".local/lib/env", code, HOME=str(home)) == "own"


def test_children_do_not_get_the_environments_libraries(prefix: Path) -> None:
    """LD_LIBRARY_PATH with env/lib breaks system programs; what else was in it stays."""
    assert "LD_LIBRARY_PATH" not in _environ(prefix, LD_LIBRARY_PATH=f"{prefix}/lib")
    both = _environ(prefix, LD_LIBRARY_PATH=f"{prefix}/bin/../lib:/opt/cuda/lib")
    assert both["LD_LIBRARY_PATH"] == "/opt/cuda/lib"


def test_the_environments_programs_come_first(prefix: Path) -> None:
    """ninja and ptxas of the environment are found, and nothing of PATH is lost."""
    path = _environ(prefix, PATH=f"/usr/bin:{prefix}/bin:/bin")["PATH"]
    assert path == f"{prefix}/bin:/usr/bin:/bin"


def test_a_variable_of_the_users_wins(prefix: Path) -> None:
    """What the hook would set stays as it was given."""
    assert _environ(prefix, TORCHINDUCTOR_CACHE_DIR="/own")["TORCHINDUCTOR_CACHE_DIR"] == "/own"


@pytest.mark.parametrize("how", ["spawned", "forked"])
def test_engine_processes_end_with_their_owner(prefix: Path, how: str) -> None:
    """The stub is killed with SIGKILL: the processes that name it as owner end within seconds, forked ones too."""
    owner = subprocess.Popen(["sleep", "600"])
    code = "import os, time\n" + ("pid = os.fork()\n" if how == "forked" else "pid = 0\n")
    code += "print(os.getpid(), flush=True) if pid == 0 else None\ntime.sleep(600)"
    child = _start(prefix, code, TRITON_VLLM_OWNER_PID=str(owner.pid))
    assert child.stdout
    pid = int(child.stdout.readline())
    try:
        pause(0.2)
        assert Path(f"/proc/{pid}").exists()
        owner.kill()
        owner.wait()
        assert child.wait(LIMIT) == -signal.SIGKILL
        wait_for(lambda: not _lives(pid), "the end of the engine's process")
    finally:
        child.stdout.close()
        child.kill()
        child.wait()


def test_an_owner_of_another_machine_is_nobodys(prefix: Path) -> None:
    """A Ray worker has the owner's variables of another machine: the id is taken for that of a process here otherwise."""
    owner = subprocess.Popen([sys.executable, "-c", ""])
    owner.wait()
    named = {"TRITON_VLLM_OWNER_PID": str(owner.pid)}
    assert _run(prefix, "print('lives')", **named, TRITON_VLLM_OWNER_PLACE="another boot") == "lives"
    here = _start(prefix, "print('lives')", **named, TRITON_VLLM_OWNER_PLACE=process_space())
    here.communicate()
    assert here.returncode == 1


def test_a_child_whose_owner_is_already_dead_ends_at_once(prefix: Path) -> None:
    """The stub died while its child was starting."""
    owner = subprocess.Popen([sys.executable, "-c", ""])
    owner.wait()
    child = _start(prefix, "print('lives')", TRITON_VLLM_OWNER_PID=str(owner.pid))
    output, _ = child.communicate()
    assert child.returncode == 1
    assert "lives" not in output


def test_the_stub_and_its_children_write_no_bytecode(prefix: Path) -> None:
    """Not beside model.py, whose folder Triton watches; every other interpreter of the environment does as it is told."""
    code = "import sys; print(sys.dont_write_bytecode)"
    assert _run(prefix, code) == "False"
    stub = prefix / "bin/triton_python_backend_stub"
    shutil.copy2(prefix / "bin/python", stub)  # follows the link: what /proc/self/exe names is this file
    try:
        done = subprocess.run([stub, "-c", code], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True)
    finally:
        stub.unlink()
    assert done.stdout.strip() == "True"
    child = {"PATH": "/usr/bin:/bin", "TRITON_VLLM_OWNER_PID": str(os.getpid())}
    done = subprocess.run([prefix / "bin/python", "-c", code], env=child, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_the_hook_costs_little(prefix: Path, bare_prefix: Path) -> None:
    """It runs in every interpreter, so it must load next to nothing."""
    code = "import sys; print(*sys.modules)"
    added = set(_run(prefix, code).split()) - set(_run(bare_prefix, code).split())
    assert added <= {"_vllm_env_runtime", "_locale", "gc"}  # the last two are part of the interpreter


def test_compiled_kernels_are_kept_per_environment(tmp_path: Path):
    """Two environments get folders of their own below the user's cache, the same one wherever they are extracted."""
    found = []
    for name, identity in (("one", "a" * 64), ("elsewhere", "a" * 64), ("two", "b" * 64)):
        prefix = tmp_path / name
        (prefix / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
        (prefix / "bin").mkdir()
        install_runtime(prefix, identity)
        code = f"import os, sys; sys.path.insert(0, {str(site_packages(prefix))!r}); import _vllm_env_runtime; "
        code += "print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path / "home")}
        done = subprocess.run([sys.executable, "-I", "-c", code], env=environment, capture_output=True, text=True, check=True)
        found.append(done.stdout.strip())
    assert found[0] == found[1] == str(tmp_path / "home" / ".cache" / "vllm_env" / "inductor" / ("a" * 16))
    assert found[2].endswith("b" * 16)


_WORK = """
import atexit, multiprocessing, sys

class Kept:
    def __del__(self):
        print("taken apart", flush=True)

def work(status):
    global kept
    kept = Kept()
    atexit.register(print, "handled")
    print("worked", flush=True)
    fork = multiprocessing.get_context("fork").Process(target=sys.exit, args=(4,))
    fork.start()
    fork.join()
    print(fork.exitcode)
    sys.exit(status)
"""
_SPAWN = """
import multiprocessing, os, sys
sys.path.insert(0, {folder!r})
import work
if {owned}:
    os.environ["TRITON_VLLM_OWNER_PID"] = str(os.getpid())
child = multiprocessing.get_context("spawn").Process(target=work.work, args=(3,))
child.start()
child.join()
print(child.exitcode)
"""


@pytest.mark.parametrize("owned", [True, False])
def test_a_child_that_the_stub_has_spawned_is_not_taken_apart(prefix: Path, tmp_path: Path, owned: bool) -> None:
    """Its exit handlers run, its streams are flushed and its status is kept; others, its own too, end as Python has it."""
    (tmp_path / "work.py").write_text(_WORK)
    said = _run(prefix, _SPAWN.format(folder=str(tmp_path), owned=owned)).split("\n")
    assert said == ["worked", "4", "handled", *(() if owned else ("taken apart",)), "3"]


def test_an_environment_for_arm_says_so_on_another_machine(tmp_path: Path) -> None:
    """At the start of a Python that finds the environment's packages, as a server's own stub does; x86-64 has no such file."""
    start = [sys.executable, "-c", f"import site; site.addpackage({str(tmp_path)!r}, {_GUARD!r}, set()); print('started')"]
    _install_guard(tmp_path, AMD64.machine)
    assert not (tmp_path / _GUARD).exists()
    _install_guard(tmp_path, "another")
    done = subprocess.run(start, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"This model was built for {ARM64.name}, and this machine is another one. Build it again")
    text = (tmp_path / _GUARD).read_text()
    (tmp_path / _GUARD).write_text(text.replace("another", os.uname().machine, 1))
    assert subprocess.run(start, capture_output=True, text=True, check=True).stdout == "started\n"
