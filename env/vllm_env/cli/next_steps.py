"""What to type after a build: the commands that start the server and ask the model."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_env.base.command import COMMAND, IS_WHEEL
from vllm_env.base.workspace import CHECKOUT, TOOLS
from vllm_env.build import BuildResult
from vllm_env.model.files import CONFIG_NAME
from vllm_env.sketch import PROVISIONED, BuildRequest, installed_triton
from vllm_env.triton.elsewhere import SINCE_RELEASE, image_of

from .run import link_for, served, server_command


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
    # Without names, the server loads all models of the repository.
    models = [request.model] if _has_other_models(request) else []
    named = ["--model", request.model] if request.model != "vllm" else []
    ask = [*_client(), "--iterations", "10", *named]
    # The client's default is prompts.txt in the current folder.
    if not IS_WHEEL and Path.cwd() != CHECKOUT:
        ask += ["--input-prompts", _here(CHECKOUT / "prompts.txt")]
    if result.triton.is_elsewhere:
        return [_in_container(result, request, models), ask]
    repository = Path(_here(request.repository))
    # This Triton may not be able to use the repository's own path.
    link = link_for(result.triton, repository)
    if link:
        commands.append(["ln", "-sfn", str(request.repository), str(link)])
        repository = link
    if IS_WHEEL:
        serve = [_program_as_typed(), "serve", *(f"--model={model}" for model in models)]
        if repository != Path(_here(BuildRequest.repository)):
            serve.append(f"--model-repository={repository}")
        if result.triton.path != installed_triton():
            serve.append(f"--triton-root={result.triton.path}")
    else:
        program, *arguments = server_command(result.triton, repository, models)
        serve = [_here(Path(program)), *arguments]
    return [*commands, serve, ask]


def _client() -> list[str]:
    """Return the command that starts the client."""
    if IS_WHEEL:
        return [_program_as_typed(), "client"]
    # With any Python, the client finds its tools in the checkout. If they are in the cache, only
    # their own Python has them.
    has_own_tools = TOOLS.is_relative_to(CHECKOUT) and shutil.which("python3")
    python = "python3" if has_own_tools else sys.executable
    return [python, _here(CHECKOUT / "client" / "client.py")]


def _program_as_typed() -> str:
    """Return how to type the program of an installed wheel."""
    program = Path(sys.argv[0]).absolute()
    # `python -m vllm_env` has started a file that nobody can type.
    if program.name != COMMAND or shutil.which(COMMAND) == str(program):
        return COMMAND
    return _here(program)


def _in_container(result: BuildResult, request: BuildRequest, models: Sequence[str]) -> list[str]:
    """Return the command that serves the model in the container of its release."""
    command = ["docker", "run", "--rm", "-it", "--shm-size=1g"]
    if _profile(result) == "cuda":
        command += ["--gpus", "all"]
    for port in (8000, 8001, 8002):
        command += ["-p", f"{port}:{port}"]
    command += ["-v", f"{request.repository.absolute()}:/models", image_of(result.triton.release)]
    return [*command, "tritonserver", *served(Path("/models"), models)]


def _profile(result: BuildResult) -> str:
    return str(result.manifest.spec.get("profile", ""))


def _has_other_models(request: BuildRequest) -> bool:
    """Return whether the repository has other models, so that the server must load only this."""
    # By default tritonserver loads every model, and ends if one fails. Another model may have no
    # environment yet. This project's own has none in a checkout where only `adopt` has run.
    models = {path.parent.name for path in request.repository.glob(f"*/{CONFIG_NAME}")}
    return bool(models - {request.model})


def _here(path: Path) -> str:
    """Return a path relative to the current folder if it is below it, else the path itself."""
    folder = Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
