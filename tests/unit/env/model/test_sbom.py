"""The bill of materials: every package once, with the digest that was verified."""

from __future__ import annotations

import json

from support.small_build import small_lock
from vllm_env.model.manifest import render_sbom


def test_every_package_is_a_component() -> None:
    """The conda layer and each wheel, named by package URL."""
    document = json.loads(render_sbom(small_lock()))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    assert {c["purl"] for c in document["components"]} == {
        "pkg:conda/python@3.11.7?build=local_0&subdir=linux-64",
        "pkg:pypi/numpy@1.26.4",
        "pkg:pypi/setuptools@84.2.1",
        "pkg:pypi/vllm@0.99.0",
    }
    assert len({c["bom-ref"] for c in document["components"]}) == 4


def test_every_component_has_the_digest_of_its_file() -> None:
    """The lock has one file for each package: that which is installed."""
    by_name = {c["name"]: c for c in json.loads(render_sbom(small_lock()))["components"]}
    assert by_name["numpy"]["hashes"] == [{"alg": "SHA-256", "content": "1" * 64}]
    assert by_name["python"]["hashes"] == [{"alg": "SHA-256", "content": "0" * 64}]
    assert by_name["vllm"]["hashes"] == [{"alg": "SHA-256", "content": "4" * 64}]
    assert by_name["setuptools"]["hashes"] == [{"alg": "SHA-256", "content": "2" * 64}]
