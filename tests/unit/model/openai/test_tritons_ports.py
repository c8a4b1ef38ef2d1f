"""Which ports are Triton's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from triton_vllm.base.errors import ConfigError
from triton_vllm.openai import start
from triton_vllm.openai.tritons_ports import parents_arguments, refuse_tritons

TRITON = "/opt/tritonserver/bin/tritonserver"
TAKEN = [
    (8000, [TRITON, "--model-repository=models"], "http"),
    (8002, ["/lib/ld-linux.so", "--library-path", "x", TRITON], "metrics"),
    (9000, [TRITON, "--grpc-port", "9000"], "grpc"),
    (9000, [TRITON, "--metrics-port=7000", "--metrics-port=9000"], "metrics"),
    (8000, [TRITON, "--http-port", "much"], "http"),
    # Triton in a program of Python: its ports are not known.
    (8000, ["python3", "main.py"], "http"),
    (8001, [], "grpc"),
]
FREE = [
    (8000, [TRITON, "--http-port=9000"]),
    (8000, [TRITON, "--allow-http=false"]),
    (8001, [TRITON, "--allow-grpc", "0"]),
    (8002, [TRITON, "--allow-metrics=False"]),
]


@pytest.mark.parametrize(("port", "arguments", "name"), TAKEN)
def test_a_port_of_triton_is_refused(port, arguments, name):
    """The message has the parameter, the endpoint and both remedies."""
    with pytest.raises(ConfigError, match=rf"OPENAI_PORT: {port} .* Triton's {name} endpoint; .* 9000, .* --{name}-port"):
        refuse_tritons(port, arguments)


@pytest.mark.parametrize(("port", "arguments"), FREE)
def test_the_others_are_free(port, arguments):
    """Also those that this Triton does not use."""
    refuse_tritons(port, arguments)


def test_a_model_gets_none_of_them():
    """The check comes before the one for the key, and before the port is taken."""
    with pytest.raises(ConfigError, match="Triton's"):
        start.reserve("0.0.0.0", 8000, without_key=False, first=None)


def test_the_parents_command_line_is_read():
    """As Triton's stub does."""
    program = "from triton_vllm.openai.tritons_ports import parents_arguments as f; print(f()[:1] != [], f()[-2])"
    room = Path(start.__file__).parents[2]
    shell = ["/bin/sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, program, "--http-port=1"]
    done = subprocess.run(shell, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(room)})
    assert done.stdout == "True --http-port=1\n", done.stderr
    assert parents_arguments()
