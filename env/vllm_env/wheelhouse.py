"""Fill a folder with everything that a build downloads, for machines without network.

DIR/*.whl          the wheels of the lock; the CPU Triton's wheel if no Triton is installed
DIR/conda/         a conda channel with the packages of the lock
DIR/tools/*.whl    the packager's own tools, for the Python that runs it now
"""

import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vllm_env.base import report
from vllm_env.base.filesystem import give_tree, owner_of
from vllm_env.base.workspace import CHECKOUT, Workspace
from vllm_env.interpreter.layer import copy_layer
from vllm_env.lock.commits import variant_index
from vllm_env.lock.fetch import PIP_RULES, by_hash
from vllm_env.lock.platforms import pip_options, platform_tags, tags_of
from vllm_env.lock.pylock import PYTORCH_INDEX, VLLM_INDEX, Lock, LockedWheel, requirements_of
from vllm_env.plan import resolve
from vllm_env.sketch import PROVISIONED, BuildRequest, make_sketch
from vllm_env.triton.provision import fetch

TOOLS_LOCK = CHECKOUT / "env" / "requirements.txt"
"""The lock of the packager's own tools. An installed wheel has none: its tools came with it."""


def fill_wheelhouse(workspace: Workspace, request: BuildRequest, folder: Path) -> Lock:
    """Fetch what a build of ``request`` would install into ``folder``; return the lock.

    Raises:
        VllmEnvError: a file cannot be fetched, or does not match the lock.
    """
    with workspace.exclusive():
        plan = resolve(workspace, make_sketch(workspace, request))
        lock = plan.lock
        # In a container, root fills the folder of a user.
        owner = owner_of(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with report.stage("wheels"):
            _fetch_wheels(workspace, lock, folder)
            report.step(f"{len(lock.wheels)} wheels")
        with report.stage("conda"):
            if lock.conda.packages:
                copy_layer(workspace, lock.conda, folder)
            else:
                report.note(
                    f"no interpreter: conda-forge does not answer, so the machine for "
                    f"{lock.spec.platform} packs its own Python {lock.python}"
                )
            report.step(f"{len(lock.conda.packages)} packages from {lock.conda.channel}")
        target = lock.spec.target
        options = pip_options(target, platform_tags(plan.triton.rules.glibc, target))
        # The machine that uses the wheelhouse may have no Triton, either.
        if plan.triton.path == PROVISIONED:
            with report.stage("triton"):
                fetch(workspace, folder, target, options)
        if TOOLS_LOCK.is_file():
            # Their wheels are for one Python: fill the wheelhouse once with each.
            with report.stage("tools"):
                what = "download the packager's own tools"
                _download(workspace, TOOLS_LOCK, folder / "tools", what, *options)
                report.step(f"for Python {sysconfig.get_python_version()}")
        give_tree(folder, owner)
    return lock


def _fetch_wheels(workspace: Workspace, lock: Lock, folder: Path) -> None:
    """Fetch the registries' wheels, then those that only PyTorch's or vLLM's index has."""
    # Another wheelhouse is not a source of the wheels: pip asks the registries.
    registries = replace(workspace, network=replace(workspace.network, wheelhouse=None))
    with workspace.cache.staging() as staging:
        requirements = staging / "requirements.txt"

        def download(wheels: Sequence[LockedWheel]) -> None:
            """Fetch wheels of the lock, those of each index by themselves."""
            # PyTorch's and vLLM's index must not be asked for the other wheels.
            backend = lock.spec.torch_backend
            own = ["--extra-index-url", variant_index(lock.spec)]
            # The torch backend and pip's options for each index; "" is the registries.
            indexes = {"": ("", []), PYTORCH_INDEX: (backend, []), VLLM_INDEX: ("", own)}
            for index, (torch_backend, options) in indexes.items():
                chosen = [wheel for wheel in wheels if wheel.index == index]
                requirements.write_text(requirements_of(chosen), "utf-8")
                _download(
                    workspace,
                    requirements,
                    folder,
                    "download the wheels of the lock",
                    # pip would choose wheels for the Python that runs it.
                    "--python-version",
                    lock.spec.python,
                    *pip_options(lock.spec.target, tags_of(wheel.file for wheel in lock.wheels)),
                    *options,
                    torch_backend=torch_backend,
                )

        by_hash(registries, lock, folder, download)


def _download(
    workspace: Workspace,
    requirements: Path,
    folder: Path,
    what: str,
    *options: str,
    torch_backend: str = "",
) -> None:
    """Fetch the wheels of a file of requirements into a folder with pip.

    Args:
        workspace: the cache and the network.
        requirements: the file. If it is empty, nothing is fetched.
        folder: the folder.
        what: the purpose, for the error message.
        *options: further options of ``pip download``.
        torch_backend: the builds of torch to find in PyTorch's index, such as ``cpu``; "" if none.

    Raises:
        VllmEnvError: a wheel cannot be fetched, or does not match its hash.
    """
    # A lock may need nothing of PyTorch's index.
    if not requirements.stat().st_size:
        return
    # pip's temporary files are removed with the staging folder, even if pip is killed.
    with workspace.cache.staging() as staging:
        workspace.network.pip_command(
            [
                "download", "--quiet", *PIP_RULES, *options,
                "--dest", folder, "--requirement", requirements,
            ],
            what,
            torch_backend=torch_backend,
            env={"TMPDIR": str(staging)},
            remedy="Check that the package registry answers.",
        )  # fmt: skip
