"""Doctor looks at the machine it runs on; what it says follows from that machine."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support import triton_folder
from support.fake_driver import make_driver
from support.small_fixtures import workspace_in
from vllm_env.cli import doctor
from vllm_env.cli.doctor import examine
from vllm_env.cli.main import main
from vllm_env.interpreter.find import Interpreter
from vllm_env.lock.spec import Overrides, load_spec
from vllm_env.triton.root import TritonRoot, rules_of


def triton(tmp_path: Path, release: str = "24.10", stubs: dict[str, Path] | None = None) -> TritonRoot:
    return TritonRoot(tmp_path, release, rules_of(release), stubs or {})


def found(name: str, root: TritonRoot | None) -> tuple[str, str, str]:
    workspace = workspace_in(Path("/nonexistent"))
    finding = next(f for f in examine(workspace, root, load_spec("cpu", Overrides())) if f.name == name)
    return finding.state, finding.what, finding.remedy


def test_a_missing_stub_names_those_there_are(tmp_path: Path):
    """A Triton with a stub for 3.12 only: the finding names it and the way out."""
    state, what, remedy = found("stub", triton(tmp_path, stubs={"3.12": tmp_path}))
    assert state == "warning"
    assert "3.11" in what
    assert "3.12" in what
    assert "--stub source" in remedy


def test_a_release_newer_than_the_table_is_told():
    """Nobody has checked the rules for it, so that is said."""
    assert found("Triton", triton(Path("/t"), "39.01"))[0] == "warning"
    assert found("Triton", triton(Path("/t"), "25.08"))[0] == "ok"
    assert "NumPy 2" in found("Triton", triton(Path("/t"), "24.10"))[1]


def test_a_taken_port_is_found():
    """With something listening on 8001 the finding names that port and the option."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", 8001))
            server.listen()
        except OSError:
            pass  # something else listens there: as good
        state, what, remedy = found("ports", None)
    assert state == "warning"
    assert "8001" in what
    assert "--grpc-port" in remedy


@pytest.mark.parametrize(
    ("limits", "state", "said"),
    [
        ((1000, 65536), "warning", "ulimit -n 4096: each"),
        ((1000, 2000), "warning", "docker run --ulimit nofile=4096, or as root ulimit -n 4096"),
        ((4096, 4096), "ok", ""),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok", ""),
    ],
)
def test_a_low_limit_of_open_files_is_found(monkeypatch, limits, state, said):
    """With a way to raise it that works; no limit is none."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    is_state, what, remedy = found("open files", None)
    assert is_state == state
    assert "-1" not in what
    assert remedy.startswith(said)


def test_without_conda_forge_the_interpreter_is_this_machines(tmp_path: Path):
    """It is named; where there is none, that is a problem, and the way out is said."""
    spec = load_spec("cpu", Overrides())
    offline = workspace_in(tmp_path)
    here = doctor._check_interpreter(offline, spec)
    assert here.state == "ok"
    assert f"Python {spec.python}." in here.what
    nowhere = doctor._check_interpreter(offline, replace(spec, python="3.99"))
    assert nowhere.state == "problem"
    assert "3.99" in nowhere.what
    assert nowhere.remedy


@pytest.mark.parametrize(
    ("needs", "name", "said"),
    [("BUILD_SPACE", "cache", "VLLM_ENV_CACHE=DIR"), ("EXTRACTED_SPACE", "unpacked", "VLLM_ENV_UNPACKED=DIR")],
    ids=["build", "unpacking"],
)
def test_a_file_system_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch, needs: str, name: str, said: str):
    """By what the profile needs, both where it is built and where a served model unpacks it; the figure is said."""
    monkeypatch.setattr(doctor, needs, {"cpu": 1})
    assert found(name, None)[0] == "ok"
    monkeypatch.setattr(doctor, needs, {"cpu": 10**18})
    state, what, remedy = found(name, None)
    assert state == "problem"
    assert "1000000000.0 GB are needed" in what
    assert said in remedy


def test_a_home_on_a_network_is_no_place_to_unpack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The next folder is judged. If all are on a network, that is a problem."""
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(doctor, "EXTRACTED_SPACE", {"cpu": 1})
    monkeypatch.setattr("vllm_env.inside.parts_places.places", lambda: [str(home / "cache"), str(temporary)])
    monkeypatch.setattr("vllm_env.inside.parts_places.network_of", lambda place: "" if place == str(temporary) else "NFS")
    state, what, _ = found("unpacked", None)
    assert state == "ok"
    assert f"free in {temporary}," in what
    monkeypatch.setattr("vllm_env.inside.parts_places.network_of", lambda _: "NFS")
    state, what, remedy = found("unpacked", None)
    assert (state, what) == ("problem", f"{home / 'cache'} and the others are on a network file system")
    assert "VLLM_ENV_UNPACKED=DIR" in remedy


def gpu(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> doctor.Finding:
    """What doctor says where nvidia-smi is the given program."""
    file = folder / "nvidia-smi"
    file.write_text(program)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return doctor._check_gpu(load_spec("cuda", Overrides()))


@pytest.mark.parametrize(
    ("prints", "state", "says"),
    [
        ("NVIDIA H200, 580.95.05, 9.0, 143771 MiB", "ok", "compute capability 9.0"),
        (
            "ERROR: ld.so: ignored.\nNVIDIA H200, 580.95.05, 9.0, 143771 MiB",
            "ok",
            "NVIDIA H200, 143771 MiB, driver 580",
        ),
        ("Tesla V100, 580.95.05, 7.0, 16384 MiB", "problem", "begin with 7.5"),
        ("NVIDIA H200, 580.95.05, [N/A], 143771 MiB", "problem", "compute capability [N/A]"),
        ("", "problem", "names no GPU; it says: nothing"),
        ("No devices were found", "problem", "names no GPU; it says: No devices were found"),
    ],
)
def test_what_nvidia_smi_prints_becomes_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints: str, state: str, says: str
):
    """Also when it ends with 0 and names no GPU, or has no number where there is usually one."""
    finding = gpu(tmp_path, monkeypatch, f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\n")
    assert finding.state == state
    assert says in finding.what
    assert bool(finding.remedy) == (state != "ok")


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n", "status 9 and says: Failed to initialize NVML"),
        ("#!/bin/sh\nexec sleep 600\n", "has not answered for 0 s"),
        ("#!/nonexistent/sh\n", "does not start: No such file"),
    ],
)
def test_an_nvidia_smi_that_fails_or_hangs_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, says: str):
    """A hanging driver must not hang doctor, which is what a user runs then."""
    if "sleep" in program:
        monkeypatch.setattr(doctor, "_SMI_SECONDS", 0.4)
    finding = gpu(tmp_path, monkeypatch, program)
    assert finding.state == "problem"
    assert says in finding.what
    assert finding.remedy


def test_a_driver_that_is_too_old_is_a_problem_of_this_cuda_version_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The committed lock names the version; a driver of CUDA 12.2 runs all of CUDA 12."""
    make_driver(tmp_path, "12.2")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    program = "#!/bin/sh\necho 'NVIDIA H200, 535.183.01, 9.0, 143771 MiB'\n"
    finding = gpu(tmp_path, monkeypatch, program)
    assert finding.state == "problem"
    assert finding.what.endswith("The NVIDIA driver 535.183.01 runs CUDA up to 12.2, and this environment is for CUDA 13.0.")
    assert finding.remedy == "Build it with ./gen_vllm_env.sh --cuda 12.9, or update the driver to 580.65 or newer."
    assert doctor._check_gpu(load_spec("cuda", Overrides(torch_backend="cu129"))).state == "ok"


def test_a_model_for_other_machines_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Of a repository's models only this one is named."""
    for name, machine in (("arm", "linux/arm64"), ("amd", "linux/amd64")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vllm_env.json").write_text(json.dumps({"spec": {"platform": machine}}))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("vllm_env.cli.commands.BuildRequest.repository", tmp_path)
    assert main(["doctor", "--json", "--profile", "cpu"]) == 1
    (finding,) = [one for one in json.loads(capsys.readouterr().out) if one["name"] == "model"]
    sentence = "This model was built for linux/arm64, and this machine is linux/amd64."
    assert (finding["state"], finding["what"]) == ("problem", f"{tmp_path}/arm: {sentence}")
    assert "Build it again" in finding["remedy"]


def test_json_lists_every_finding(capsys: pytest.CaptureFixture[str]):
    """``doctor --json`` prints a list with state, name and remedy; nothing else on stdout."""
    status = main(["doctor", "--json", "--profile", "cpu"])
    findings = json.loads(capsys.readouterr().out)
    assert {"Triton", "stub", "GPU", "ports"} <= {f["name"] for f in findings}
    assert status == int(any(f["state"] == "problem" for f in findings))


@pytest.mark.parametrize(
    ("options", "is_gpu", "profile"),
    [([], False, "cpu"), ([], True, "cuda"), (["--cuda", "12.9"], False, "cuda"), (["--profile", "cpu"], True, "cpu")],
)
def test_doctor_looks_at_the_profile_that_a_build_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], is_gpu: bool, profile: str
):
    """In a container: one function decides for both."""
    seen = []
    monkeypatch.setattr("vllm_env.sketch.CONTAINER_ROOT", triton_folder.make_root(tmp_path))
    monkeypatch.setattr("vllm_env.sketch.has_gpu", lambda: is_gpu)
    monkeypatch.setattr("vllm_env.cli.commands.examine", lambda _, __, spec: seen.append(spec.profile) or [])
    assert main(["doctor", *options]) == 0
    assert seen == [profile]


def test_what_compiles_at_run_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """GPU kernels need a C compiler, which the default environment brings; on a CPU models run eagerly without one for C++."""
    cuda, cpu = (load_spec(profile, Overrides()) for profile in ("cuda", "cpu"))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    own, none, eager = (doctor._check_compiler(spec) for spec in (cuda, replace(cuda, requirements=()), cpu))
    assert (own.state, none.state, eager.state) == ("ok", "warning", "warning")
    assert "brings its own" in own.what
    assert "--with ziglang" in none.remedy
    assert "eagerly" in eager.what
    for name in ("gcc", "g++"):
        (tmp_path / name).touch(mode=0o755)
    assert [doctor._check_compiler(spec).what for spec in (cuda, cpu)] == [str(tmp_path / "gcc"), str(tmp_path / "g++")]


def test_an_interpreter_without_headers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch.compile compiles against them on a CPU; a GPU's kernels are compiled with the environment's own compiler."""
    spec = load_spec("cpu", Overrides(python=".".join(map(str, sys.version_info[:2]))))
    here = doctor._check_interpreter(workspace_in(tmp_path), spec)
    monkeypatch.setattr(Interpreter, "headers", None)
    bare = doctor._check_interpreter(workspace_in(tmp_path), spec)
    assert (here.state, bare.state) == ("ok", "warning")
    assert f"libpython{spec.python}-dev" in bare.remedy
