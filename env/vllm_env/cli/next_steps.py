"""What to type after a build: the commands that start the server and ask the model."""

import shlex
import shutil
import sys
from pathlib import Path

from vllm_env.base.cache import key_of
from vllm_env.base.workspace import CHECKOUT, TOOLS
from vllm_env.build import BuildResult
from vllm_env.model.files import CONFIG_NAME
from vllm_env.sketch import PROVISIONED, BuildRequest
from vllm_env.triton.elsewhere import SINCE_RELEASE, image_of
from vllm_env.triton.root import backend_arguments, is_plain


def next_lines(result: BuildResult, request: BuildRequest) -> list[str]:
    """Return the lines that a build prints at its end."""
    lines = ["Next:", *(f"  {shlex.join(command)}" for command in next_commands(result, request))]
    if result.unserved:
        lines.append(f"not served here: {result.unserved}")
    # A user of this profile has a server elsewhere, and seldom of the wheel's release.
    if _profile(result) == "cuda" and result.triton.path == PROVISIONED:
        lines.append(
            f"It is for Triton {result.triton.release} only. For another release: "
            f"--triton-release YY.MM (since {SINCE_RELEASE}), or build in its container"
        )
    return lines


def next_commands(result: BuildResult, request: BuildRequest) -> list[list[str]]:
    """Return the commands that start the server and ask the model, for the current folder."""
    commands = []
    python = sys.executable
    # The client finds its checkout's tools by itself. An installed wheel has only this interpreter.
    if TOOLS.is_relative_to(CHECKOUT) and shutil.which("python3"):
        python = "python3"
    ask = [python, _here(CHECKOUT / "client" / "client.py"), "--iterations", "10"]
    if request.model != "vllm":
        ask += ["--model", request.model]
    # The client's default is prompts.txt in the current folder.
    if Path.cwd() != CHECKOUT:
        ask += ["--input-prompts", _here(CHECKOUT / "prompts.txt")]
    if result.triton.is_elsewhere:
        return [_in_container(result, request), ask]
    repository = _here(request.repository)
    # Such a Triton cannot start a stub there (root.py). A relative path hides a space above it. It
    # does not hide other letters than ASCII: the stub makes it absolute.
    is_usable = is_plain(repository) and str(request.repository.resolve()).isascii()
    if result.triton.rules.activates and not is_usable:
        link = f"/tmp/vllm_env_models-{key_of(str(request.repository))[:8]}"  # noqa: S108
        commands.append(["ln", "-sfn", str(request.repository), link])
        repository = link
    binary = result.triton.binary
    serve = [_here(binary), *backend_arguments(binary), f"--model-store={repository}"]
    return [*commands, [*serve, *_only_this_model(request)], ask]


def _in_container(result: BuildResult, request: BuildRequest) -> list[str]:
    """Return the command that serves the model in the container of its release."""
    command = ["docker", "run", "--rm", "-it", "--shm-size=1g"]
    if _profile(result) == "cuda":
        command += ["--gpus", "all"]
    for port in (8000, 8001, 8002):
        command += ["-p", f"{port}:{port}"]
    command += ["-v", f"{request.repository.absolute()}:/models", image_of(result.triton.release)]
    return [*command, "tritonserver", "--model-store=/models", *_only_this_model(request)]


def _profile(result: BuildResult) -> str:
    return str(result.manifest.spec.get("profile", ""))


def _only_this_model(request: BuildRequest) -> list[str]:
    # By default tritonserver loads every model, and ends if one fails. Another model may have no
    # environment yet. This project's own has none in a checkout where only `adopt` has run.
    if _has_other_models(request):
        return ["--model-control-mode=explicit", f"--load-model={request.model}"]
    return []


def _has_other_models(request: BuildRequest) -> bool:
    models = {path.parent.name for path in request.repository.glob(f"*/{CONFIG_NAME}")}
    return bool(models - {request.model})


def _here(path: Path) -> str:
    """Return a path relative to the current folder if it is below it, else the path itself."""
    folder = Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
