"""``serve`` and ``client``: the commands that a build names next, in a word.

Each replaces this process, so that signals and the exit code are the program's own.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_env.base.cache import key_of
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.process import become
from vllm_env.base.report import Console
from vllm_env.base.workspace import CHECKOUT
from vllm_env.model.files import CONFIG_NAME
from vllm_env.model.manifest import FOREIGN_REMEDY, MANIFEST_NAME, foreign
from vllm_env.sketch import BuildRequest, installed_triton
from vllm_env.triton.root import TritonRoot, backend_arguments, is_plain, open_root

from .doctor import is_taken

# Triton's options for its ports, with their defaults.
_PORTS = {"--http-port": 8000, "--grpc-port": 8001, "--metrics-port": 8002}


def serve(options: argparse.Namespace, _: Console) -> int:
    """Become the Triton of this machine, on a model repository.

    Raises:
        VllmEnvError: there is no Triton, no built model, or a port is taken.
    """
    path = options.triton_root or installed_triton()
    if path is None:
        raise VllmEnvError(
            "There is no Triton here.",
            cause="The first build makes a CPU Triton in .triton/.",
            remedy="Build a model, or name a Triton with --triton-root DIR.",
        )
    triton = open_root(path)
    repository = options.model_repository or BuildRequest.repository
    for model in options.models or ["*"]:
        _check_built(repository, model)
    _check_place(triton, repository)
    _check_ports(options.arguments)
    command = server_command(triton, repository, options.models or ())
    # bootstrap.py set PYTHONPATH for this program. vLLM's processes must not import from there.
    environment = dict(os.environ)
    if environment.get("PYTHONPATH") == str(CHECKOUT / "env"):
        del environment["PYTHONPATH"]
    become([*command, *options.arguments], environment)


def client(options: argparse.Namespace, _: Console) -> int:
    """Start the client with the arguments of the command line."""
    program = CHECKOUT / "client" / "client.py"
    become([sys.executable, str(program), *options.arguments], os.environ)


def server_command(triton: TritonRoot, repository: Path, models: Sequence[str]) -> list[str]:
    """Return the command that serves these models of a repository; without names, all of them."""
    binary = triton.binary
    return [str(binary), *backend_arguments(binary), *served(repository, models)]


def served(repository: Path, models: Sequence[str]) -> list[str]:
    """Return tritonserver's options for these models of a repository; without names, for all."""
    options = [f"--model-store={repository}"]
    if models:
        options += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in models)]
    return options


def link_for(triton: TritonRoot, repository: Path) -> Path | None:
    """Return a place for a link to a repository whose own path this Triton cannot use, or None."""
    # Such a Triton cannot start a stub there (root.py). A relative path hides a space above it. It
    # does not hide other letters than ASCII: the stub makes it absolute.
    is_usable = is_plain(repository) and str(repository.resolve()).isascii()
    if not triton.rules.activates or is_usable:
        return None
    name = f"vllm_env_models-{key_of(str(repository.absolute()))[:8]}"
    return Path("/tmp", name)  # noqa: S108 - a plain place that every machine has


def _check_built(repository: Path, model: str) -> None:
    """Raise a VllmEnvError unless a built model for this machine is there; ``*`` names any."""
    folders = sorted(file.parent for file in repository.glob(f"{model}/{MANIFEST_NAME}"))
    # Triton 24.10 lets a shell read the stub of another machine as a script, and waits for ever.
    for folder in folders:
        if sentence := foreign(folder):
            raise VllmEnvError(f"{folder}: {sentence}", remedy=FOREIGN_REMEDY)
    if folders:
        return
    # tritonserver would say that it cannot find a path.
    named = "" if model == "*" else f" {model}"
    built = sorted(file.parent.name for file in repository.glob(f"*/{MANIFEST_NAME}"))
    cause = f"Built models there: {', '.join(built)}." if built else ""
    remedy = "Build it, or name another repository with --model-repository DIR."
    if (repository / CONFIG_NAME).is_file():
        cause = "It is a model, not the folder above it."
        remedy = f"Write --model-repository {repository.absolute().parent}."
    raise VllmEnvError(f"{repository} has no built model{named}.", cause=cause, remedy=remedy)


def _check_place(triton: TritonRoot, repository: Path) -> None:
    """Raise a VllmEnvError if the Triton cannot use the repository's path; it names a link."""
    link = link_for(triton, repository)
    if link is None:
        return
    make = shlex.join(["ln", "-sfn", str(repository.absolute()), str(link)])
    raise VllmEnvError(
        f"Triton {triton.release} starts no model in {repository}.",
        cause="It takes only paths of plain letters, without spaces.",
        remedy=f"{make}, then give --model-repository {link}.",
    )


def _check_ports(arguments: Sequence[str]) -> None:
    """Raise a VllmEnvError if a usual port is taken. tritonserver says so only after a load."""
    named = {argument.partition("=")[0] for argument in arguments}
    for option, port in _PORTS.items():
        if option not in named and is_taken(port):
            raise VllmEnvError(
                f"Port {port} is taken.",
                cause="Another server listens there.",
                remedy=f"End it, or choose another port: serve -- {option}=N.",
            )
