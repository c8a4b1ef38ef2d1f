"""The manifests of ``deploy/``, rendered, and the checks that hold them together."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from support.repositories import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

Resource = dict[str, Any]

KUBERNETES = CHECKOUT / "deploy" / "kubernetes"
OVERLAYS = sorted(folder.name for folder in (KUBERNETES / "overlays").iterdir())
COMPONENTS = sorted(folder.name for folder in (KUBERNETES / "components").iterdir())
SERVER = "nvcr.io/nvidia/tritonserver:24.10-py3"
MODEL = "registry.example/vllm:0.32.0"
_OLDEST_KUSTOMIZE = 5


def require_kubectl() -> None:
    """Skip the test where no kubectl can render the manifests."""
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    said = subprocess.check_output(["kubectl", "version", "--client", "--output=json"])
    version = json.loads(said).get("kustomizeVersion", "v0")
    if int(re.sub(r"\D.*", "", version.removeprefix("v"))) < _OLDEST_KUSTOMIZE:
        pytest.skip(f"kubectl has kustomize {version}, which is too old")


def write_own(folder: Path, resource: str, *components: str, server: str = SERVER, model: str = MODEL, more: str = "") -> Path:
    """Write a kustomization as a user has it, on a folder of ``deploy/kubernetes``; return its folder.

    Args:
        folder: is made.
        resource: an overlay, or ``kserve``.
        components: their names.
        server: Triton's image.
        model: the exported one.
        more: further lines.
    """
    folder.mkdir()
    there = os.path.relpath(KUBERNETES, folder.resolve())
    lines = [
        f"resources: [{there}/{resource}]",
        f"components: [{', '.join(f'{there}/components/{name}' for name in components)}]",
        "images:",
        *(_image(name, chosen) for name, chosen in (("tritonserver", server), ("vllm-model", model))),
    ]
    (folder / "vllm_engine_args.json").write_text('{"model": "standin"}')
    if "engine-arguments" in components:
        lines += ["configMapGenerator:", "- {name: vllm-engine-arguments, files: [vllm_engine_args.json]}"]
    (folder / "kustomization.yaml").write_text("\n".join([*lines, more]))
    return folder


def _image(name: str, chosen: str) -> str:
    new_name, _, tag = chosen.rpartition(":")
    return f"- {{name: {name}, newName: {new_name}, newTag: '{tag}'}}"


def of_kind(resources: list[Resource], kind: str) -> Resource:
    """Return the only resource of a kind."""
    (found,) = [one for one in resources if one["kind"] == kind]
    return found


def pod_spec(resources: list[Resource]) -> Resource:
    """Return the pod's specification of a Deployment, or what KServe makes it of."""
    kinds = {one["kind"]: one for one in resources}
    if "Deployment" in kinds:
        return dict(kinds["Deployment"]["spec"]["template"]["spec"])
    of_cluster = kinds["ClusterServingRuntime"]["spec"]
    predictor = kinds["InferenceService"]["spec"]["predictor"]
    return {
        "containers": of_cluster["containers"],
        "volumes": of_cluster["volumes"],
        "terminationGracePeriodSeconds": predictor["terminationGracePeriodSeconds"],
    }


def seconds(probe: Resource) -> int:
    """Return after how long a probe that always fails has a consequence."""
    return int(probe["periodSeconds"] * probe["failureThreshold"])


def faults_of(resources: list[Resource], unload_grace: float) -> list[str]:
    """Return what is wrong in a pod with how it ends, is probed, is named and may write.

    Args:
        resources: what was rendered.
        unload_grace: the model's UNLOAD_GRACE_SECONDS.
    """
    spec = pod_spec(resources)
    (container,) = spec["containers"]
    return [
        *_ends(spec, container, unload_grace),
        *_probes(container),
        *_names(resources, spec, container),
        *_rights(container),
    ]


def _ends(spec: Resource, container: Resource, unload_grace: float) -> list[str]:
    (option,) = [one for one in container["args"] if one.startswith("--exit-timeout-secs=")]
    exit_timeout = int(option.partition("=")[2])
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = spec["terminationGracePeriodSeconds"]
    faults = []
    if exit_timeout < unload_grace + 4:
        faults.append(f"--exit-timeout-secs {exit_timeout} cuts off an unload of {unload_grace} s")
    if before + exit_timeout + 5 > grace:
        faults.append(f"{before} + {exit_timeout} s do not fit into a grace period of {grace} s")
    return faults


def _probes(container: Resource) -> list[str]:
    faults = []
    if container["livenessProbe"].get("exec", {}).get("command") != ["bash", "/probes/alive.sh"]:
        faults.append("the liveness probe does not see a dead stub")
    if "/probes/ready.sh" not in container["readinessProbe"].get("exec", {}).get("command", []):
        faults.append("the readiness probe does not see an engine that restarts")
    if seconds(container["startupProbe"]) < 6 * 149:
        faults.append("the startup probe has no room for a first start and a download")
    if any(probe["timeoutSeconds"] > probe["periodSeconds"] for probe in _all_probes(container)):
        faults.append("a probe may take longer than its period")
    return faults


def _all_probes(container: Resource) -> list[Resource]:
    return [value for name, value in container.items() if name.endswith("Probe")]


def _names(resources: list[Resource], spec: Resource, container: Resource) -> list[str]:
    maps = {one["metadata"]["name"] for one in resources if one["kind"] == "ConfigMap"}
    named = {volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume}
    faults = [f"there is no ConfigMap {name}" for name in sorted(named - maps)]
    images = [container["image"]]
    images += [volume["image"]["reference"] for volume in spec["volumes"] if "image" in volume]
    faults += [f"the image {image} has no tag" for image in images if ":" not in image]
    volumes = {volume["name"] for volume in spec["volumes"]}
    faults += [f"there is no volume {mount['name']}" for mount in container["volumeMounts"] if mount["name"] not in volumes]
    return faults


def _rights(container: Resource) -> list[str]:
    rights = container["securityContext"]
    is_restricted = (
        rights["readOnlyRootFilesystem"]
        and not rights["allowPrivilegeEscalation"]
        and rights["capabilities"] == {"drop": ["ALL"]}
    )
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    home = {variable["name"]: variable.get("value") for variable in container["env"]}["HOME"]
    faults = [] if is_restricted else ["the container has more rights than it needs"]
    faults += [f"nothing is mounted at {path}" for path in ("/tmp", "/dev/shm", home) if path not in mounted]
    return faults
