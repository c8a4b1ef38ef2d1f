"""The manifests render, and their parts fit together; tests/integration/test_manifests.py has Kubernetes' own schemas."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from run_pod import render
from support.manifests import (
    COMPONENTS,
    KUBERNETES,
    MODEL,
    OVERLAYS,
    SERVER,
    faults_of,
    of_kind,
    pod_spec,
    require_kubectl,
    seconds,
    write_own,
)
from support.pages import blocks_in
from support.repositories import CHECKOUT
from triton_vllm.startup.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("_kubectl")]

PAGE = CHECKOUT / "docs" / "kubernetes.md"
GRACE = Settings.unload_grace_s
SERVERS = [*(f"overlays/{name}" for name in OVERLAYS), "kserve"]

# Read in the CRDs of KServe at aaac4e294 (charts/kserve-crd) and of KEDA at 8b4f083ca (config/crd/bases). What is below
# `containers` and `volumes` is Kubernetes' own.
FIELDS = {
    "ClusterServingRuntime": {
        "spec.annotations", "spec.supportedModelFormats.name", "spec.supportedModelFormats.version",
        "spec.supportedModelFormats.autoSelect", "spec.supportedModelFormats.priority", "spec.protocolVersions",
        "spec.containers", "spec.volumes",
    },
    "InferenceService": {
        "spec.predictor.terminationGracePeriodSeconds", "spec.predictor.model.runtime", "spec.predictor.model.modelFormat.name",
        "spec.predictor.model.protocolVersion", "spec.predictor.model.storageUri",
    },
    "ScaledObject": {
        "spec.scaleTargetRef.name", "spec.minReplicaCount", "spec.maxReplicaCount", "spec.cooldownPeriod", "spec.triggers.type",
        "spec.triggers.metadata",
    },
}  # fmt: skip
# Those of KEDA's Prometheus trigger (pkg/scalers/prometheus_scaler.go).
TRIGGER_FIELDS = {"serverAddress", "query", "threshold"}
_OPAQUE = {"spec.annotations", "spec.protocolVersions", "spec.containers", "spec.volumes", "spec.triggers.metadata"}


@pytest.fixture
def _kubectl() -> None:
    require_kubectl()


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The overlay ``cpu`` with a user's images."""
    require_kubectl()
    return render(write_own(tmp_path_factory.mktemp("own") / "own", "overlays/cpu"))


def fields_of(value: Any, path: str) -> set[str]:
    """Return the paths of all fields; the items of a list share theirs."""
    if path in _OPAQUE:
        return {path}
    if isinstance(value, list):
        return set().union(*(fields_of(item, path) for item in value))
    if isinstance(value, dict):
        return set().union(*(fields_of(item, f"{path}.{name}") for name, item in value.items()))
    return {path}


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_has_no_faults(server: str, tmp_path: Path) -> None:
    """By a kustomization as the page has it; without one, the images have no tag, and nothing else is wrong."""
    assert faults_of(render(write_own(tmp_path / "own", server)), GRACE) == []
    unnamed = ["the image tritonserver has no tag", "the image vllm-model has no tag"]
    assert faults_of(render(KUBERNETES / server), GRACE) == unnamed[: 1 if server == "kserve" else 2]


def test_the_page_names_the_images(tmp_path: Path) -> None:
    """The kustomization that docs/kubernetes.md types; tests/e2e/test_pasted.py asks a model for its release."""
    (text,) = re.findall(r"kustomization\.yaml <<END\n(.*?)^END$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    text, count = re.subn(r"\$\(\./gen_vllm_env\.sh inspect .*\)", "24.10", text)
    assert count == 1
    there = os.path.relpath(KUBERNETES, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(text.replace("../", f"{there}/"))
    resources = render(tmp_path)
    assert faults_of(resources, GRACE) == []
    assert pod_spec(resources)["containers"][0]["image"] == SERVER


def test_the_page_has_all_components() -> None:
    """And no other."""
    assert sorted(re.findall(r"^- \.\./components/([\w-]+) ", PAGE.read_text("utf-8"), re.MULTILINE)) == COMPONENTS


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_component_fits(component: str, rendered: list[dict[str, Any]], tmp_path: Path) -> None:
    """It changes the pod, or adds a resource, and makes no fault."""
    resources = render(write_own(tmp_path / "own", "overlays/cpu", component))
    assert faults_of(resources, GRACE) == []
    assert pod_spec(resources) != pod_spec(rendered) or len(resources) > len(rendered)


def test_all_components_together(tmp_path: Path) -> None:
    """Each has its place in the pod."""
    resources = render(write_own(tmp_path / "own", "overlays/cpu", *COMPONENTS))
    (container,) = pod_spec(resources)["containers"]
    variables = {variable["name"] for variable in container["env"]}
    assert variables >= {"VLLM_API_KEY", "VLLM_ENV_UNPACKED", "HF_HUB_OFFLINE", "HF_TOKEN"}
    assert {port["containerPort"] for port in container["ports"]} == {8000, 8001, 8002, 9000}
    assert {port["port"] for port in of_kind(resources, "Service")["spec"]["ports"]} == {8000, 8001, 8002, 9000}
    (model,) = [volume for volume in pod_spec(resources)["volumes"] if volume["name"] == "model"]
    assert model == {"name": "model", "persistentVolumeClaim": {"claimName": "vllm-models", "readOnly": True}}


def mistakes() -> dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]]:
    """Return mistakes by what a check says of them; each is made in a pod and its container."""
    return {
        "do not fit into a grace period": lambda pod, _: pod.update(terminationGracePeriodSeconds=30),
        "cuts off an unload": lambda _, one: one.update(args=["--exit-timeout-secs=10"]),
        "does not see a dead stub": lambda _, one: one.update(livenessProbe=one["startupProbe"]),
        "does not see an engine that restarts": lambda _, one: one.update(readinessProbe=one["startupProbe"]),
        "no room for a first start": lambda _, one: one["startupProbe"].update(failureThreshold=30),
        "longer than its period": lambda _, one: one["readinessProbe"].update(timeoutSeconds=6),
        "there is no ConfigMap": lambda pod, _: pod["volumes"].append({"configMap": {"name": "vllm-probes"}, "name": "x"}),
        "there is no volume": lambda _, one: one["volumeMounts"].append({"name": "y", "mountPath": "/y"}),
        "has no tag": lambda _, one: one.update(image="tritonserver"),
        "more rights": lambda _, one: one["securityContext"].update(readOnlyRootFilesystem=False),
        "nothing is mounted at /dev/shm": lambda _, one: one["volumeMounts"].pop(),
    }


@pytest.mark.parametrize("said", mistakes())
def test_a_mistake_is_found(said: str, rendered: list[dict[str, Any]]) -> None:
    """Each by its own words, and by nothing else."""
    resources = copy.deepcopy(rendered)
    pod = of_kind(resources, "Deployment")["spec"]["template"]["spec"]
    mistakes()[said](pod, pod["containers"][0])
    (fault,) = faults_of(resources, GRACE)
    assert said in fault


def test_a_rollout_waits_for_a_start(tmp_path: Path) -> None:
    """Kubernetes calls a rollout failed only after the startup probe has."""
    for overlay in OVERLAYS:
        resources = render(write_own(tmp_path / overlay, f"overlays/{overlay}"))
        (container,) = pod_spec(resources)["containers"]
        deadline = of_kind(resources, "Deployment")["spec"]["progressDeadlineSeconds"]
        assert deadline > seconds(container["startupProbe"]) + pod_spec(resources)["terminationGracePeriodSeconds"]


def test_two_versions_know_only_their_own_pods(tmp_path: Path) -> None:
    """By the lines that docs/kubernetes.md has for the second one."""
    (more,) = [block.text for block in blocks_in(PAGE) if block.text.startswith("nameSuffix")]
    both = [
        render(write_own(tmp_path / "a", "overlays/cpu")),
        render(write_own(tmp_path / "b", "overlays/cpu", more=more)),
    ]
    for own, other in (both, both[::-1]):
        pod = of_kind(other, "Deployment")["spec"]["template"]["metadata"]
        selectors = [
            of_kind(own, "Service")["spec"]["selector"],
            of_kind(own, "Deployment")["spec"]["selector"]["matchLabels"],
            of_kind(own, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        ]
        assert all(selector.items() - pod["labels"].items() for selector in selectors)
    names = [{(one["kind"], one["metadata"]["name"]) for one in resources} for resources in both]
    assert not names[0] & names[1]


def test_custom_resources_use_fields_that_exist(tmp_path: Path) -> None:
    """Those of KServe and KEDA, no others; and an unknown one is seen."""
    resources = [*render(KUBERNETES / "kserve"), *render(write_own(tmp_path / "own", "overlays/cpu", "keda"))]
    for kind, fields in FIELDS.items():
        custom = of_kind(resources, kind)
        assert fields_of(custom["spec"], "spec") == fields
        custom["spec"]["minReplicas"] = 1
        assert fields_of(custom["spec"], "spec") != fields
    (trigger,) = of_kind(resources, "ScaledObject")["spec"]["triggers"]
    assert trigger["metadata"].keys() == TRIGGER_FIELDS
    assert (
        of_kind(resources, "ScaledObject")["spec"]["scaleTargetRef"]["name"]
        == of_kind(resources, "Deployment")["metadata"]["name"]
    )


def test_kserve_gets_the_image_by_the_patch_of_its_first_lines(tmp_path: Path) -> None:
    """As a comment there has it."""
    text = (KUBERNETES / "kserve" / "kustomization.yaml").read_text("utf-8")
    more = "".join(line.removeprefix("#   ") for line in text.splitlines(keepends=True) if line.startswith("#   "))
    service = of_kind(render(write_own(tmp_path / "own", "kserve", more=more)), "InferenceService")
    assert service["spec"]["predictor"]["model"]["storageUri"] == f"oci+native://{MODEL}"


def test_compose_runs_the_same_server() -> None:
    """Its times, its rights, its image without a release, and only paths that are there."""
    file = CHECKOUT / "deploy" / "compose.yaml"
    (service,) = yaml.safe_load(file.read_text("utf-8"))["services"].values()
    pod = pod_spec(render(KUBERNETES / "overlays/one-gpu"))
    (container,) = pod["containers"]
    assert service["command"][1] in container["args"]
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert int(service["stop_grace_period"].removesuffix("s")) >= pod["terminationGracePeriodSeconds"] - before
    assert re.fullmatch(r"nvcr\.io/nvidia/tritonserver:\$\{TRITON:\?.*\}-py3", service["image"])
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["healthcheck"]["test"][1:] == container["readinessProbe"]["exec"]["command"]
    bound = [volume.partition(":")[0] for volume in service["volumes"] if volume.startswith(".")]
    assert bound
    assert all((file.parent / path).is_dir() for path in bound)


def test_no_release_is_named_by_hand() -> None:
    """That of Triton is the model's; it is nowhere in the manifests."""
    texts = [file.read_text("utf-8") for file in (CHECKOUT / "deploy").rglob("*") if file.is_file()]
    assert not [text for text in texts if re.search(r"(newTag|tritonserver): *\d|tritonserver:\d", text)]
    assert re.search(r"tritonserver:\d", SERVER)
