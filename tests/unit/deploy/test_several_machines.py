"""The manifests for an engine on several machines: they render, and their parts fit together. No cluster has run them."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from run_pod import render
from support.manifests import KUBERNETES, MODEL, SERVER, faults_of, of_kind, require_kubectl, write_own
from support.repositories import CHECKOUT
from triton_vllm.startup.settings import Settings
from vllm_env.publish.model_folder import CODE_NAMES

if TYPE_CHECKING:
    from pathlib import Path

WAYS = ("without-ray", "with-ray")
FOLDER = KUBERNETES / "several-machines"
# Read in LeaderWorkerSet's documentation; what is below the two templates is Kubernetes' own.
FIELDS = {"replicas", "startupPolicy", "leaderWorkerTemplate"}
TEMPLATE_FIELDS = {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}


@pytest.fixture(params=WAYS)
def resources(request: pytest.FixtureRequest, tmp_path: Path) -> list[dict[str, Any]]:
    """What a user's kustomization renders."""
    require_kubectl()
    return render(write_own(tmp_path / "own", f"several-machines/{request.param}"))


def template_of(resources: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the template of a group of machines."""
    spec = of_kind(resources, "LeaderWorkerSet")["spec"]
    assert spec.keys() == FIELDS
    template: dict[str, Any] = spec["leaderWorkerTemplate"]
    assert template.keys() == TEMPLATE_FIELDS
    return template


def test_the_leader_is_a_server_as_any_other(resources: list[dict[str, Any]]) -> None:
    """How it ends, is probed, is named and what it may write; the Service reaches only it."""
    leader = template_of(resources)["leaderTemplate"]
    assert faults_of([*resources, {"kind": "Deployment", "spec": {"template": leader}}], Settings.unload_grace_s) == []
    selector = of_kind(resources, "Service")["spec"]["selector"]
    assert selector.pop("leaderworkerset.sigs.k8s.io/worker-index") == "0"
    assert selector.items() <= leader["metadata"]["labels"].items()


def test_all_machines_have_the_same_files(resources: list[dict[str, Any]]) -> None:
    """The images that the user has named, volumes, rights and resources."""
    template = template_of(resources)
    leader, worker = (template[name]["spec"] for name in ("leaderTemplate", "workerTemplate"))
    for name in ("volumes", "securityContext", "tolerations"):
        assert worker[name] == leader[name]
    ones = [spec["containers"][0] for spec in (leader, worker)]
    for name in ("image", "volumeMounts", "securityContext", "resources"):
        assert ones[0][name] == ones[1][name]
    assert ones[0]["image"] == SERVER
    assert leader["volumes"][0]["image"]["reference"] == MODEL


def test_the_engine_uses_all_gpus_of_all_machines(resources: list[dict[str, Any]]) -> None:
    """By its parallel sizes; without Ray it is told how many machines there are."""
    template = template_of(resources)
    (settings,) = [one["data"] for one in resources if "vllm_engine_args.json" in one.get("data", {})]
    values = json.loads(settings["vllm_engine_args.json"])
    limits = template["workerTemplate"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = template["size"] * int(limits["nvidia.com/gpu"])
    assert math.prod(values[f"{name}_parallel_size"] for name in ("tensor", "pipeline")) == gpus
    assert values.get("nnodes", template["size"]) == template["size"]
    assert ("nnodes" in values) is (values.get("distributed_executor_backend") != "ray")


def test_the_model_has_one_front_end() -> None:
    """Its config.pbtxt is the one that every model gets, for an exported environment, with `count: 1`."""
    own = (FOLDER / "without-ray" / "config.pbtxt").read_text("utf-8")
    every = (CHECKOUT / "model_repository" / "vllm" / "config.pbtxt").read_text("utf-8")
    assert own == every.replace("/vllm_env.tar.gz", "/vllm_env")
    assert "count: 1\n" in own


def test_the_other_machines_start_the_models_own_program(tmp_path: Path) -> None:
    """By the environment's interpreter; its number and the leader's address are in variables."""
    require_kubectl()
    resources = render(write_own(tmp_path / "own", "several-machines/without-ray"))
    command = template_of(resources)["workerTemplate"]["spec"]["containers"][0]["command"]
    model = "/mnt/image/models/vllm"
    assert command == [f"{model}/vllm_env/bin/python", f"{model}/1/node.py"]
    assert "node.py" in CODE_NAMES
