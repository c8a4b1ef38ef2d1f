"""Fill a folder with everything that a build downloads, for machines without network.

DIR/*.whl              the wheels of the lock, verified by its hashes; the CPU Triton's wheel if no Triton is installed
DIR/conda/             a conda channel with the packages of the lock
DIR/tools/*.whl        the packager's own tools, for the Python that runs it now; fill it once with each PYTHON
"""

import sysconfig
from pathlib import Path

from vllm_env.base import report
from vllm_env.base.filesystem import give_tree, owner_of
from vllm_env.base.workspace import CHECKOUT, Workspace
from vllm_env.interpreter.layer import copy_layer
from vllm_env.lock.pylock import PYTORCH, Lock
from vllm_env.plan import PROVISIONED, BuildRequest, make_plan
from vllm_env.triton.provision import fetch

TOOLS_LOCK = CHECKOUT / "env" / "requirements.txt"
"""The lock of the packager's own tools. An installed wheel has no such lock: its tools are installed with it."""


def fill_wheelhouse(workspace: Workspace, request: BuildRequest, folder: Path) -> Lock:
    """Resolve what a build of ``request`` would install, fetch it into ``folder`` and return its lock.

    Raises:
        VllmEnvError: a file cannot be fetched, or does not match the lock.
    """
    with workspace.exclusive():
        plan = make_plan(workspace, request)
        lock = plan.lock
        assert lock  # noqa: S101 - only a dry run may not know it
        owner = owner_of(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with report.stage("wheels"):
            _fetch_wheels(workspace, lock, folder)
            report.step(f"{len(lock.wheels)} wheels")
        with report.stage("conda"):
            copy_layer(workspace, lock.conda, folder)
            report.step(f"{len(lock.conda.packages)} packages from {lock.conda.channel}")
        if plan.triton.path == PROVISIONED:  # the other machine may have no Triton, either
            with report.stage("triton"):
                fetch(workspace, folder)
        if TOOLS_LOCK.is_file():
            with report.stage("tools"):
                _download(
                    workspace, TOOLS_LOCK, folder / "tools", "download the packager's own tools"
                )
                report.step(f"for Python {sysconfig.get_python_version()}")
        give_tree(folder, owner)
    return lock


def _fetch_wheels(workspace: Workspace, lock: Lock, folder: Path) -> None:
    """Fetch the registries' wheels; then those that only PyTorch's index has, which is not asked for others."""
    with workspace.cache.staging() as staging:
        for index, backend in (("", ""), (PYTORCH, lock.spec.torch_backend)):
            requirements = staging / f"{index}requirements.txt"
            requirements.write_text(
                "".join(f"{wheel.requirement}\n" for wheel in lock.wheels if wheel.index == index),
                "utf-8",
            )
            options = ["--python-version", lock.spec.python]
            _download(
                workspace,
                requirements,
                folder,
                "download the wheels of the lock",
                *options,
                torch_backend=backend,
            )


def _download(
    workspace: Workspace,
    requirements: Path,
    folder: Path,
    what: str,
    *options: str,
    torch_backend: str = "",
) -> None:
    if not requirements.stat().st_size:
        return
    with workspace.cache.staging() as staging:
        workspace.network.pip_command(
            [
                "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:", *options,
                "--dest", folder, "--requirement", requirements,
            ],
            what,
            torch_backend=torch_backend,
            env={"TMPDIR": str(staging)},
            remedy="Check that the package registry answers; --upgrade if a locked wheel was withdrawn.",
        )  # fmt: skip
