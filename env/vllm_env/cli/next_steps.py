"""What to type after a build: the commands that start the server and ask the model."""

import shlex
import shutil
import sys
from pathlib import Path

from vllm_env.base.workspace import CHECKOUT, TOOLS
from vllm_env.build import BuildResult
from vllm_env.model.files import CONFIG_NAME
from vllm_env.plan import BuildRequest


def next_lines(result: BuildResult, request: BuildRequest) -> list[str]:
    """Return the lines that a build prints at its end."""
    return ["Next:", *(f"  {shlex.join(command)}" for command in next_commands(result, request))]


def next_commands(result: BuildResult, request: BuildRequest) -> tuple[list[str], list[str]]:
    """Return the commands that start the server and ask the model, for the current folder."""
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
    serve = [_here(result.triton.binary), f"--model-store={_here(request.repository)}"]
    # By default tritonserver loads every model, and ends if one fails. Another model may have no
    # environment yet. This project's own has none in a checkout where only `adopt` has run.
    if _has_other_models(request):
        serve += ["--model-control-mode=explicit", f"--load-model={request.model}"]
    return serve, ask


def _has_other_models(request: BuildRequest) -> bool:
    models = {path.parent.name for path in request.repository.glob(f"*/{CONFIG_NAME}")}
    return bool(models - {request.model})


def _here(path: Path) -> str:
    """Return a path relative to the current folder if it is below it, else the path itself."""
    folder = Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
