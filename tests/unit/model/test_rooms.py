"""What a module of `triton_vllm` needs to be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PLACE = Path(__file__).parents[3] / "model_repository" / "vllm" / "1"
PACKAGE = PLACE / "triton_vllm"
MODULES = {
    ".".join(path.relative_to(PLACE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
}
TRITON = {"base.triton", "service", "startup.load", "request.admit"}
"""These need Triton's module, which only the stub has."""


def test_every_module_imports_without_vllm_and_all_but_a_few_without_triton():
    """The server loads model.py in a process that only completes the configuration."""
    wanted = [name for name in MODULES if name.removeprefix("triton_vllm.") not in TRITON]
    code = f"import sys; sys.modules['vllm'] = sys.modules['triton_python_backend_utils'] = None; import {', '.join(wanted)}"
    subprocess.run([sys.executable, "-c", code], cwd=PLACE, check=True, timeout=300)


def test_nothing_of_the_environment_is_imported_before_it_is_unpacked():
    """Of an environment in parts only NumPy is there, which Triton needs. An import of more would unpack it, and say why not."""
    mock = "import sys, unittest.mock as m; sys.modules['triton_python_backend_utils'] = m.MagicMock(); before = set(sys.modules)"
    names = "{name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names"
    argv = [sys.executable, "-c", f"{mock}; import triton_vllm.service; print(*sorted({names}))"]
    done = subprocess.run(argv, cwd=PLACE, check=True, timeout=300, capture_output=True, text=True)
    assert set(done.stdout.split()) - {"__mp_main__"} == {"numpy", "triton_vllm"}  # multiprocessing's name for __main__


def test_without_a_port_nothing_of_the_openai_server_is_imported():
    """Neither this project's part of it nor what it needs."""
    code = (
        "import sys, unittest.mock as m; sys.modules['triton_python_backend_utils'] = m.MagicMock(); import triton_vllm.service; "
    )
    code += "print([name for name in sys.modules if name.startswith(('triton_vllm.openai', 'uvicorn', 'fastapi'))])"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=PLACE, check=True, timeout=300, capture_output=True, text=True)
    assert done.stdout == "[]\n"
