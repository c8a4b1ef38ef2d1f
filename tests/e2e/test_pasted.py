"""The blocks of the pages, pasted into a fresh shell in a checkout with a built model, page by page.

In a network of their own, so that the usual ports are free there; what builds has the machine's network. A server that a block
starts runs on, as in a terminal of its own. What a comment below a command shows must be printed, numbers apart.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.model_control import GIVEN_UP
from support.namespaces import without_network
from support.pages import PASTED_PAGES, blocks_in, typed_in
from support.patience import wait_for
from support.reference import ONE_THREAD
from support.repositories import CHECKOUT, copied_checkout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.models import MadeModels

pytestmark = [pytest.mark.e2e, pytest.mark.slow]  # builds, and a server for each page
SERVER = ".triton/bin/tritonserver --model-store=model_repository"
READY_SECONDS = 300.0
STARTS = 4
ASSIGNMENT = re.compile(r"(?:export )?[A-Z]+=\S+$")


@dataclass
class House:
    """A checkout with a built model, and shells in it.

    Attributes:
        folder: the checkout.
        network: the process in whose network servers and their clients are.
        saved: a copy of the model repository, as it was built.
        server: the server that runs.
        log: what it prints.
    """

    folder: Path
    network: subprocess.Popen[bytes]
    saved: Path
    log: Path
    server: subprocess.Popen[bytes] | None = None
    variables: list[str] = field(default_factory=list)

    def shell(self, command: str, *, apart: bool) -> list[str]:
        """Return the command line of a fresh shell, in the network apart or not."""
        inside = ["nsenter", "--target", str(self.network.pid), "--net"] if apart else []
        return [*inside, "bash", "-euo", "pipefail", "-c", "\n".join((*self.variables, command))]

    def serve(self, command: str) -> None:
        """Start a server, again if Triton gives the load up, and wait until its models are ready."""
        port = re.search(r"--http-port=(\d+)", command)
        ready = self.shell(f"curl -sf localhost:{port[1] if port else 8000}/v2/health/ready", apart=True)
        for _ in range(STARTS):
            self.stop()
            with self.log.open("wb") as log:
                argv = self.shell(f"exec env {command}", apart=True)
                server = self.server = subprocess.Popen(argv, cwd=self.folder, stdout=log, stderr=log)
            wait_for(
                lambda server=server: server.poll() is not None or subprocess.run(ready, check=False).returncode == 0,
                lambda: self.log.read_text(errors="replace")[-4000:],
                limit=READY_SECONDS,
            )
            if server.poll() is None or GIVEN_UP not in self.log.read_text(errors="replace"):
                break
        assert server.poll() is None, self.log.read_text(errors="replace")[:8000]

    def stop(self) -> None:
        """End the server."""
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            self.server.wait(120)
            self.server = None

    def reset(self) -> None:
        """Give the model repository back what was built."""
        self.stop()
        self.variables.clear()
        shutil.rmtree(self.folder / "model_repository")
        shutil.copytree(self.saved, self.folder / "model_repository", copy_function=copy_settings)

    def paste(self, command: str) -> str:
        """Paste a command, and return what it prints."""
        if ASSIGNMENT.match(command):
            self.variables.append(command)
            return ""
        if ".triton/bin/tritonserver" in command:
            self.serve(command)
            return self.log.read_text(errors="replace")
        asks = "localhost" in command or "client/client.py" in command
        if asks and self.server is None:
            self.serve(SERVER)
        done = subprocess.run(
            self.shell(command, apart=asks),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
        if "config.pbtxt" in command:
            self.stop()  # the next request starts it again
        return done.stdout


def copy_settings(source: str, target: str) -> None:
    """Copy a small file, which a block may change, and link a large one."""
    if Path(source).stat().st_size < 1_000_000:
        shutil.copy2(source, target)
    else:
        os.link(source, target)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, made_models: MadeModels) -> Iterator[House]:
    """Built by README's command. `models/opt` is a model of Triton's own backend."""
    folder = copied_checkout(tmp_path_factory.mktemp("pasted") / "vllm-env")
    with pytest.MonkeyPatch.context() as patch, subprocess.Popen([*without_network(), "sleep", "inf"]) as network:
        for name, value in ONE_THREAD.items():
            patch.setenv(name, value)
        house = House(folder, network, folder.parent / "saved", folder.parent / "log")
        try:
            house.paste("./gen_vllm_env.sh")
            shutil.copytree(folder / "model_repository", house.saved, copy_function=copy_settings)
            official = folder / "models" / "opt"
            (official / "1").mkdir(parents=True)
            (official / "config.pbtxt").write_text('backend: "vllm"\ninstance_group [{ count: 1 kind: KIND_MODEL }]\n')
            (official / "1" / "model.json").write_text(f'{{"model": "{made_models.llama}", "gpu_memory_utilization": 0.2}}')
            yield house
        finally:
            house.stop()
            network.kill()


def pattern_of(line: str) -> str:
    """Return a pattern for a line that a page shows: `…` stands for anything, and so does each number."""
    # What comes after a wide gap explains the line.
    line = re.split(r"(?<=\S) {4,}", line)[0]
    parts = [re.sub(r"\d+(?:\\\.\d+)*", r"[\\d.]+", re.escape(part)) for part in re.split(r"…", line)]
    return re.sub(r"(?:\\ )+", r"\\s+", ".*?".join(parts))


@pytest.mark.parametrize("page", PASTED_PAGES)
def test_the_blocks_of_a_page_can_be_pasted(house: House, page: str) -> None:
    """In their order; each command succeeds and prints what the page shows."""
    house.reset()
    for block in blocks_in(CHECKOUT / page):
        if not block.pasted:
            continue
        for command, shown in typed_in(block.text):
            printed = house.paste(command)
            for line in shown:
                assert re.search(pattern_of(line), printed, re.DOTALL), f"{command}\nshows: {line}\nprinted: {printed[-3000:]}"
