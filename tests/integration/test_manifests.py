"""The manifests against Kubernetes' own schemas, which refuse unknown fields."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from run_pod import render
from support.manifests import COMPONENTS, OVERLAYS, of_kind, pod_spec, require_kubectl, write_own
from support.repositories import BUILD_SECONDS, CHECKOUT, data_folder
from vllm_env.base.locks import locked

if TYPE_CHECKING:
    from pathlib import Path

# Image volumes are a beta without subPath in the first, a beta in the second, and on by default in the third.
VERSIONS = ("1.33", "1.35", "1.37")
CUSTOM = ("ScaledObject", "ClusterServingRuntime", "InferenceService", "LeaderWorkerSet")  # tests/unit/deploy knows their fields


@pytest.fixture(scope="module")
def validate() -> Path:
    """The program with the schemas, in an environment of its own: 17,000 files, which no other test needs."""
    require_kubectl()
    folder = data_folder() / "kubernetes"
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = CHECKOUT / "tests" / "kubernetes.txt"
    argv = [sys.executable, "-B", CHECKOUT / "env" / "bootstrap.py", "--environment", folder, lock]
    with locked(folder.with_suffix(".lock"), lambda: None):
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS)
    assert done.returncode == 0, done.stderr
    return folder / "bin" / "kubernetes-validate"


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What Kubernetes itself gets of each overlay, of each with all components, and of KServe."""
    folder = tmp_path_factory.mktemp("manifests")
    found = {}
    for name in OVERLAYS:
        more = [one for one in COMPONENTS if (name, one) != ("several-gpus", "engine-arguments")]
        found[name] = render(write_own(folder / name, f"overlays/{name}"))
        found[f"{name}-and-components"] = render(write_own(folder / f"{name}-and-components", f"overlays/{name}", *more))
    kserve = render(write_own(folder / "kserve", "kserve"))
    # Kubernetes gets a pod with the containers and volumes of the custom resources.
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "kserve"}, "spec": pod_spec(kserve)}
    found["kserve"] = [*kserve, pod]
    for way in ("without-ray", "with-ray"):
        resources = render(write_own(folder / way, f"several-machines/{way}"))
        template = of_kind(resources, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
        specs = [template[role]["spec"] for role in ("leaderTemplate", "workerTemplate")]
        found[way] = [*resources, *({**pod, "metadata": {"name": "machine"}, "spec": spec} for spec in specs)]
    return {name: [one for one in resources if one["kind"] not in CUSTOM] for name, resources in found.items()}


def said_of(validate: Path, resources: list[dict[str, Any]], file: Path, version: str) -> tuple[int, str]:
    """Return the program's exit status and what it says of resources."""
    file.write_text("\n---\n".join(map(json.dumps, resources)))
    argv = [validate, "--strict", "--kubernetes-version", version, file]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_are_valid(validate: Path, pods: dict[str, list[dict[str, Any]]], tmp_path: Path, version: str) -> None:
    """Each resource passed, and by the schemas of this version."""
    resources = [one for many in pods.values() for one in many]
    status, said = said_of(validate, resources, tmp_path / "all.yaml", version)
    assert status == 0, said
    assert said.count(f"against version {version}\n") == len(resources)
    assert "WARN" not in said


def mistakes() -> dict[str, tuple[str, Any]]:
    """Return mistakes by what is said of them: where in the pod, and the value."""
    return {
        "'readinesProbe' was unexpected": ("containers/0/readinesProbe", {}),
        "'45s' is not of type": ("terminationGracePeriodSeconds", "45s"),
        "'seconds' is a required property": ("containers/0/lifecycle/preStop/sleep", {}),
        "'tag' was unexpected": ("volumes/0/image/tag", "24.10"),
        "'volumes' were unexpected|'volume' was unexpected": ("volume", []),
    }


@pytest.mark.parametrize("said", mistakes())
def test_a_mistake_is_found(validate: Path, pods: dict[str, list[dict[str, Any]]], tmp_path: Path, said: str) -> None:
    """A wrong name, a wrong type, a missing field."""
    deployment = json.loads(json.dumps(of_kind(pods["cpu"], "Deployment")))
    path, value = mistakes()[said]
    *parents, last = path.split("/")
    place = deployment["spec"]["template"]["spec"]
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    place[last] = value
    status, printed = said_of(validate, [deployment], tmp_path / "wrong.yaml", VERSIONS[-1])
    assert status == 1
    assert any(one in printed for one in said.split("|")), printed
