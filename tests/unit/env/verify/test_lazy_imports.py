"""What vLLM imports later, imported in a real small environment: what is missing, what is broken, what never ends."""

from __future__ import annotations

import contextlib
import re
import sys
import venv
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from support.elf_files import make_library
from support.small_fixtures import workspace_in
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.verify.launcher_check import start
from vllm_env.verify.lazy_imports import is_broken, judge_failures, later_imports
from vllm_env.verify.tree_rules import Expected

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_env.base.workspace import Workspace

pytestmark = pytest.mark.long  # each starts interpreters

CPU = Expected("3.11", "25.12", {})
LOCKED = {"pillow": "12.0", "xgrammar": "0.2.8", "torch": "2.13.0"}
CUDA = Expected("3.11", "25.12", {}, profile="cuda")
LONG = 60.0  # s, which none of the modules here comes near
SOON = 3.0  # s, for those that never end


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment with an interpreter and nothing else, in a folder whose name has a space."""
    folder = tmp_path / "python env"
    venv.create(folder, symlinks=True)
    return folder


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """An empty cache and no network."""
    return workspace_in(tmp_path / "cache")


def import_each(
    workspace: Workspace, environment: Path, modules: tuple[str, ...] | None, expected: Expected, seconds: float = LONG
) -> dict[str, dict[str, Any]]:
    """Start the environment, import vLLM if it is there, then the modules; return the failures."""
    with later_imports(workspace, environment, expected, seconds, modules) as later:
        started = start(workspace, environment, ("vllm", "vllm.v1.engine.async_llm"), activates=expected.activates, later=later)
    return dict(started.failures)


def check(workspace: Workspace, environment: Path, expected: Expected) -> tuple[str, ...]:
    """Import what the profile imports later, and judge it."""
    return judge_failures(import_each(workspace, environment, None, expected), environment, expected.versions)


def _add(environment: Path, modules: dict[str, str]) -> tuple[str, ...]:
    """Write modules with their sources, packages as ``package.__init__``; return their names."""
    packages = environment / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    for name, source in modules.items():
        file = packages.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, "utf-8")
    return tuple(modules)


TOLERATED = {
    "driver": "raise RuntimeError('Found no NVIDIA driver on your system.')",
    "library": "raise ImportError('libcuda.so.1: cannot open shared object file: No such file or directory')",
    "its_cause": "raise RuntimeError('not supported') from OSError('cuInit: CUDA_ERROR_NO_DEVICE')",
    "optional": "import nowhere.inside",
    "said_otherwise": "try:\n    import nowhere\nexcept ImportError as e:\n    raise ImportError('needs nowhere') from e",
}
BROKEN = {
    "attribute": ("import json\njson.cudaLibrary_t", r"AttributeError: module 'json' has no attribute 'cudaLibrary_t'"),
    "symbol": ("raise ImportError('x.so: undefined symbol: _ZN3c10')", r"undefined symbol: _ZN3c10"),
    "locked": ("import xgrammar", r"No module named 'xgrammar'"),
    "lost": ("import PIL", r"No module named 'PIL'"),
    "lacking": ("import json.nothing", r"No module named 'json\.nothing'"),
    "fallback": ("try:\n    import nowhere\nexcept ImportError:\n    1 / 0", r"ZeroDivisionError"),
    "exits": ("raise SystemExit(0)", r"SystemExit: 0"),
    "exits_at_once": ("import os\nos._exit(0)", r"ended with exit status 0"),
    "aborts": ("import os\nos.abort()", r"ended with SIGABRT"),
    "segfault": ("import ctypes\nctypes.string_at(0)", r"ended with SIGSEGV"),
}


def test_tells_what_is_missing_from_what_is_broken(environment: Path, workspace: Workspace) -> None:
    """Whatever a module does, the ones after it are still imported; what is not there at all is passed over."""
    broken = {name: source for name, (source, _) in BROKEN.items()}
    modules = _add(environment, TOLERATED | broken | {"fine": "", "torch.__init__": ""})
    info = environment / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "pillow-12.0.dist-info"
    info.mkdir()  # pillow is installed, but its files are gone
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pillow\nVersion: 12.0\n")
    (info / "RECORD").write_text("PIL/__init__.py,,\n")
    failures = import_each(workspace, environment, (*modules[:-1], "torch.gone", "gone"), CPU, LONG)
    assert {name for name, failure in failures.items() if is_broken(failure, LOCKED)} == {*BROKEN}
    assert {*failures} == {*TOLERATED, *BROKEN, "torch.gone", "gone"}
    for name, (_, text) in BROKEN.items():
        assert re.search(text, failures[name]["text"])
    assert failures["attribute"]["place"].endswith("site-packages/attribute.py:2")


def test_a_failure_leaves_nothing_to_the_next_ones(environment: Path, workspace: Workspace) -> None:
    """What is half imported would let them fail as well, or pass."""
    modules = _add(
        environment, {"half": "import sys\nsys.half = True\n1 / 0", "next": "import sys\nassert not hasattr(sys, 'half')"}
    )
    assert {*import_each(workspace, environment, modules, CPU, LONG)} == {"half"}


def test_an_import_that_never_ends_is_a_note(environment: Path, workspace: Workspace) -> None:
    """Machines are slow: it is named and no error; those behind it are imported, and nothing of it stays.

    One run is judged twice: with what the module behind it does, and without.
    """
    _add(environment, {"tokenizers": "import signal\nwhile True: signal.pause()", "llguidance": "1 / 0"})
    failures = import_each(workspace, environment, ("tokenizers", "llguidance"), CPU, SOON)
    with pytest.raises(VllmEnvError, match="import llguidance: ZeroDivisionError"):
        judge_failures(failures, environment, {})
    del failures["llguidance"]
    notes = judge_failures(failures, environment, {})
    assert notes == ("these imports took too long to be checked: tokenizers",)
    assert list(workspace.cache.path("build").iterdir()) == []
    assert [p for p in psutil.process_iter() if str(workspace.cache.root) in _folder(p)] == []


def _folder(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.cwd()
    return ""


def test_the_error_names_module_reason_and_place(environment: Path, workspace: Workspace) -> None:
    """As seen on a GPU: files of two packages over each other, which the first import of flashinfer shows."""
    clash = {"flashinfer.__init__": "from cuda.bindings import runtime\nruntime.cudaLibrary_t", "flashinfer.decode": ""}
    _add(environment, clash | {"cuda.bindings.__init__": "", "cuda.bindings.runtime": "", "llguidance": "1 / 0"})
    with pytest.raises(VllmEnvError) as caught:
        check(workspace, environment, CUDA)
    assert caught.value.what.startswith("vLLM will not be able to import flashinfer (nor flashinfer.sampling, flashinfer.decode")
    assert "module 'cuda.bindings.runtime' has no attribute 'cudaLibrary_t'" in caught.value.what
    assert f"(lib/python3.{sys.version_info.minor}/site-packages/flashinfer/__init__.py:2)" in caught.value.what
    assert "--with PACKAGE==VERSION" in caught.value.remedy
    _add(environment, {"llguidance": ""})
    assert check(workspace, environment, CPU) == ()


@pytest.mark.parametrize("release", ["24.10", "25.12"])
def test_the_standin_stands_in_for_the_driver(environment: Path, workspace: Workspace, tmp_path: Path, release: str) -> None:
    """Under both generations of the launcher; a CPU's environment gets none."""
    driver = make_library(tmp_path / "linker", "libcuda.so.1", symbol="cuInit")
    make_library(environment / "lib", "extension.so", needs=(driver,), uses="cuInit", symbol="own")
    load = "import ctypes, os\ncode = ctypes.CDLL('extension.so', os.RTLD_NOW).calls_cuInit()"
    load += "\nassert not hasattr(ctypes.CDLL('libnvidia-ml.so.1'), 'nvmlInit_v2')"
    _add(environment, {"extension": f"{load}\nraise RuntimeError(f'{{code}}: CUDA_ERROR_NO_DEVICE')"})
    expected = Expected("3.11", release, {}, profile="cuda")
    failure = import_each(workspace, environment, ("extension",), expected, LONG)["extension"]
    assert failure["text"] == "RuntimeError: 100: CUDA_ERROR_NO_DEVICE"
    without = import_each(workspace, environment, ("extension",), Expected("3.11", release, {}), LONG)["extension"]
    assert "libcuda.so.1: cannot open" in without["text"]


def test_what_is_broken_behind_the_driver_is_found(environment: Path, workspace: Workspace, tmp_path: Path) -> None:
    """ld.so looks for libcuda.so.1 before it looks for symbols: without the stand-in this fault is taken for a missing driver."""
    driver = make_library(tmp_path / "linker", "libcuda.so.1", symbol="cuInit")
    make_library(environment / "lib", "extension.so", needs=(driver,), uses="of_another_wheel", symbol="own")
    _add(environment, {"extension": "import ctypes, os\nctypes.CDLL('extension.so', os.RTLD_NOW)"})
    failure = import_each(workspace, environment, ("extension",), CUDA, LONG)["extension"]
    assert "undefined symbol: of_another_wheel" in failure["text"]
    assert is_broken(failure, {})


def test_without_a_compiler_what_needs_a_driver_is_not_imported(
    environment: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It could not be told from what is broken; the rest is imported, and the user is told how to have a compiler."""
    monkeypatch.setattr("shutil.which", lambda *_: None)
    _add(
        environment,
        VLLM
        | {
            "flashinfer.__init__": "1 / 0",
            "llguidance": "1 / 0",
            "vllm.platforms.cuda": "import ctypes\nctypes.CDLL('libcuda.so.1')",
        },
    )
    _add(environment, {"a.__init__": "class Cpu: pass"})
    with pytest.raises(VllmEnvError, match="import llguidance: ZeroDivisionError"):
        check(workspace, environment, CUDA)
    assert "add ziglang to the spec" in capsys.readouterr().err


VLLM = {
    "vllm.__init__": "",
    "vllm.platforms.__init__": (
        "import importlib\nbuiltin_platform_plugins = {'cuda': lambda: None}\n"
        "def __getattr__(name):\n"
        "    if name != 'current_platform': raise AttributeError(name)\n"
        "    module, _, kind = (builtin_platform_plugins['cuda']() or 'a.Cpu').rpartition('.')\n"
        "    return getattr(importlib.import_module(module), kind)\n"
    ),
    "vllm.platforms.interface": "import typing\nclass DeviceCapability(typing.NamedTuple):\n    major: int\n    minor: int\n",
    "vllm.platforms.cuda": (
        "from . import interface\nclass CudaPlatform:\n"
        "    @classmethod\n    def get_device_capability(cls, device_id=0): raise RuntimeError('No CUDA GPUs are available')\n"
    ),
    "vllm.v1.engine.async_llm": "from vllm.platforms import current_platform",
    "vllm.lora.model_manager": (
        "from vllm.platforms import current_platform\nassert current_platform.get_device_capability(device_id=0) == (9, 0)\n1 / 0"
    ),
}


def test_vllm_takes_the_profiles_platform(environment: Path, workspace: Workspace) -> None:
    """Modules that decide by the GPU what to import are imported as on one; a package's own modules are found."""
    _add(environment, VLLM)
    failures = import_each(workspace, environment, ("vllm.lora.*", "nowhere.*"), CUDA, LONG)
    assert {name: failure["text"] for name, failure in failures.items()} == {
        "vllm.lora.model_manager": "ZeroDivisionError: division by zero"
    }


def test_a_broken_platform_is_broken(environment: Path, workspace: Workspace) -> None:
    """What the platform itself imports is judged like the rest. What vLLM starts with must not lack any module."""
    _add(environment, VLLM | {"vllm.platforms.cuda": "import json.nothing"})
    with pytest.raises(VllmEnvError, match=r"import vllm\.platforms\.cuda .*No module named 'json\.nothing'"):
        check(workspace, environment, CUDA)
    _add(environment, VLLM | {"vllm.v1.engine.async_llm": "import nowhere"})
    with pytest.raises(VllmEnvError, match=r"import vllm\.v1\.engine\.async_llm.*No module named 'nowhere'"):
        check(workspace, environment, CUDA)


def test_an_interpreter_that_ends_early_is_an_error(environment: Path, workspace: Workspace) -> None:
    """vLLM itself is imported in the process that starts the others."""
    _add(environment, {"vllm.__init__": "", "vllm.v1.engine.async_llm": "import os\nos.abort()"})
    with pytest.raises(CommandError, match="start the environment as Triton since"):
        check(workspace, environment, CPU)
    _add(environment, {"vllm.v1.engine.__init__": "import json.nothing"})
    with pytest.raises(CommandError, match="start the environment as Triton since"):
        check(workspace, environment, CPU)
    _add(environment, {"vllm.v1.engine.__init__": "", "vllm.v1.engine.async_llm": "import os\nos._exit(0)"})
    with pytest.raises(CommandError, match="without an answer"):
        check(workspace, environment, CPU)
