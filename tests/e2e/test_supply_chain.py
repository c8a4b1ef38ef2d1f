"""The bill of materials and the signature of a built model, each checked with the tool that others use, from the registry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.bill_of_materials import found_in, listed_in
from support.pages import blocks_in, typed_in
from support.repositories import CHECKOUT

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif("VLLM_ENV_TEST_ENVIRONMENT" in os.environ, reason="serves an environment that was not built"),
]
VALIDATOR = "cyclonedx-python-lib[json-validation]==11.12.0"
VALIDATE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
print(JsonStrictValidator(SchemaVersion.V1_5).validate_str(sys.stdin.read()))
"""
(BLOCK,) = (block for block in blocks_in(CHECKOUT / "SECURITY.md") if "test_supply_chain.py" in block.reason)
COMMANDS = typed_in(BLOCK.text)


def typed(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False)


def test_the_bill_of_materials_validates(built_repository: Path, disk_folder: Path) -> None:
    """By the schema of CycloneDX 1.5, without any field that it does not know."""
    install = [str(Path(sys.executable).parent / "uv"), "pip", "install", "--quiet", "--python", sys.executable]
    subprocess.run([*install, "--target", str(disk_folder), VALIDATOR], check=True)
    text = (built_repository / "vllm" / "vllm_env.cdx.json").read_text("utf-8")

    def validated(document: str) -> str:
        command = [sys.executable, "-c", VALIDATE]
        variables = {**os.environ, "PYTHONPATH": str(disk_folder)}
        return subprocess.run(command, input=document, env=variables, capture_output=True, text=True, check=True).stdout

    assert validated(text) == "None\n"
    assert "digest" in validated(text.replace('"alg"', '"digest"', 1))


def test_the_bill_of_materials_is_what_lies_there(built_repository: Path, unpacked_environment: Path) -> None:
    """Each installed wheel, the interpreter, the stub with the libraries beside it, and each library that no wheel lists.

    ``VLLM_ENV_TEST_REPOSITORY`` names another built model, such as one for CUDA.
    """
    model = built_repository / "vllm"
    listed = listed_in(model)
    found = found_in(model, unpacked_environment)
    print(f"{len(found.wheels)} wheels, {len(found.conda)} conda packages, {len(found.files)} programs and libraries")
    assert listed == found
    assert "ziglang" in found.wheels or json.loads((model / "vllm_env.json").read_text())["spec"]["profile"] == "cpu"
    assert {"lib/libssl.so.3", "triton_python_backend_stub"} <= found.files.keys()


@pytest.mark.slow
def test_one_changed_byte_of_a_signed_model_is_found(built_repository: Path, disk_folder: Path) -> None:
    """Each line as it stands; then the last one again, with one byte of the stub changed, and with a file added."""
    model = disk_folder / "model_repository" / "vllm"
    shutil.copytree(built_repository / "vllm", model, copy_function=os.link)
    for command, shown in COMMANDS:
        done = typed(command, disk_folder)
        assert done.returncode == 0, done.stdout + done.stderr
        assert all(line in done.stdout + done.stderr for line in shown)
    verify, _ = COMMANDS[-1]
    stub = model / "triton_python_backend_stub"
    data = bytearray(stub.read_bytes())
    stub.unlink()  # a hard link
    data[len(data) // 2] ^= 1
    stub.write_bytes(data)
    done = typed(verify, disk_folder)
    assert done.returncode != 0
    assert stub.name in done.stdout + done.stderr
    data[len(data) // 2] ^= 1
    stub.write_bytes(data)
    assert typed(verify, disk_folder).returncode == 0
    (model / "1" / "sitecustomize.py").write_text("")
    assert typed(verify, disk_folder).returncode != 0
