"""A model for another kind of machine in this machine's real tritonserver: what docs/troubleshooting.md says of it."""

from __future__ import annotations

import errno
import re
import struct
import subprocess
from typing import TYPE_CHECKING

import psutil
import pytest

from support.repositories import CHECKOUT, ensure_triton, triton_root
from support.thin_builds import finished_lab
from vllm_env.base.errors import CommandError
from vllm_env.base.machine import this_platform
from vllm_env.serve.server import Launch, TritonServer
from vllm_env.triton.root import STUB_NAME

if TYPE_CHECKING:
    from pathlib import Path

# Of elf.h, and where a 64-bit header has them. RISC-V's is for machines with an emulator for the other two.
_MACHINES = {"x86_64": 62, "aarch64": 183, "riscv64": 243}
_MACHINE_OFFSET = 18
# The server's own time, and two looks at its processes; a machine with other work may need longer.
_BOUND_SECONDS = 120.0
_ROW = re.compile(rf'^\| "(?P<first>[^"]+)" or "(?P<second>[^"]+)" after `{STUB_NAME}`, and the server waits', re.MULTILINE)


def _make_foreign(stub: Path) -> None:
    """Say in a program's header that it is for another kind of machine, for which the kernel starts none here."""
    for name, number in _MACHINES.items():
        if name == this_platform().machine:
            continue
        with stub.open("r+b") as stream:
            stream.seek(_MACHINE_OFFSET)
            stream.write(struct.pack("<H", number))
        try:
            subprocess.run([stub], check=False, capture_output=True, timeout=60)
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                return
            raise
    pytest.skip("emulators are registered here, so the kernel starts programs of all other kinds")


@pytest.mark.slow
def test_the_load_of_a_foreign_stub_ends_as_the_page_says(
    finished_place: Path, thin_wheels: Path, small_wheel: Path, tmp_path: Path
) -> None:
    """One of the two messages after the stub's name; stock Triton would wait, so our start ends the server. Nothing is left."""
    row = _ROW.search((CHECKOUT / "docs/troubleshooting.md").read_text("utf-8"))
    assert row
    ensure_triton()
    lab = finished_lab(finished_place, tmp_path, small_wheel, thin_wheels)
    _make_foreign(lab.model / STUB_NAME)
    server = TritonServer(
        triton_root() / "bin/tritonserver",
        lab.repository,
        log=tmp_path / "server.log",
        launch=Launch(ready_timeout=_BOUND_SECONDS),
    )
    with pytest.raises(CommandError) as failed, server:
        pass
    assert failed.value.what.startswith("The model's stub ended at its start, and tritonserver would wait for it for ever.")
    said = (tmp_path / "server.log").read_text("utf-8", "replace")
    # A shell takes the program for a script. What it then complains of depends on the program's bytes.
    seen = rf"{STUB_NAME}: .*({row['first']}|{row['second']})"
    assert re.search(seen, said), said[-3000:]
    assert re.search(seen, "\n".join(failed.value.lines()))
    assert server.leftovers == ()
    assert server.members() == []
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert [line for line in lines if str(tmp_path) in line] == []
