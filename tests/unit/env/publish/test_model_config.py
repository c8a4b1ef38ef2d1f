"""The official backend's configuration is edited as text, and only where it must be."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_env.base.errors import VllmEnvError
from vllm_env.model.files import parse_config
from vllm_env.publish.model_config import default_count, rewrite_config, with_count

FILE = Path("config.pbtxt")
PLACE = "$$TRITON_MODEL_DIRECTORY/vllm_env"


def rewritten(text: str) -> str:
    return rewrite_config(FILE, text, "vllm_env")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('# why\nbackend: "vllm" # stays\nname: "x"', '# why\nbackend: "python" # stays\nname: "x"'),
        ("name: 'x', backend : 'vllm'; max_batch_size: 0", "name: 'x', backend : \"python\"; max_batch_size: 0"),
        ('# backend: "vllm"\nbackend: # here\n  "vllm"\r\n', '# backend: "vllm"\nbackend: # here\n  "python"\r\n'),
        ('backend:"vllm" runtime: "model.py"', 'backend:"python" runtime: "libtriton_python.so"'),
        ('backend: "vllm"\ndefault_model_filename: "model.json"', 'backend: "python"\ndefault_model_filename: "model.py"'),
        (
            'parameters [{key: "a" value: <string_value: "backend: \'vllm\'">}] backend: "vllm"',
            'parameters [{key: "a" value: <string_value: "backend: \'vllm\'">}] backend: "python"',
        ),
    ],
)
def test_only_the_backends_fields_are_replaced(before: str, after: str) -> None:
    """Comments, quotes, separators and the ends of lines stay; what looks like the field in a comment or a string is none."""
    assert rewritten(before).startswith(after.rstrip())


def test_what_a_user_has_written_stays() -> None:
    """Instance groups, parameters, version policy, warm-up, batching and a tensor's own declaration mean what they did."""
    text = """
    backend: "vllm"
    instance_group [{ count: 2 kind: KIND_GPU gpus: [1, 3] }]
    version_policy: { latest { num_versions: 1 } }
    parameters { key: "REPORT_CUSTOM_METRICS" value { string_value: "true" } }
    model_warmup { name: "w" batch_size: 0 inputs { key: "text_input" value { data_type: TYPE_STRING dims: 1 zero_data: true } } }
    response_cache { enable: true }
    input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
    a_field_of_a_newer_triton { x: 1 }
    """
    before, after = parse_config(FILE, text), parse_config(FILE, rewritten(text))
    assert after.backend == "python"
    assert after.parameters["EXECUTION_ENV_PATH"].string_value == PLACE
    for field in ("instance_group", "version_policy", "model_warmup", "response_cache", "input", "output"):
        assert getattr(after, field) == getattr(before, field)
    assert after.parameters["REPORT_CUSTOM_METRICS"].string_value == "true"


def test_an_environment_that_is_named_is_replaced_once() -> None:
    """An official model may name one of its own; a second adoption, with another layout, changes that name alone."""
    text = 'backend: "vllm" parameters { key: "EXECUTION_ENV_PATH" # mine\n value { string_value: "/opt/env" } }'
    once = rewritten(text)
    assert once.startswith(text.replace("/opt/env", PLACE).replace('"vllm"', '"python"'))
    assert rewritten(once) == once
    other = rewrite_config(FILE, once, "vllm_env.tar.gz")
    assert other == once.replace(PLACE, f"{PLACE}.tar.gz")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('backend: "vllm', "as a model configuration: 1:10"),
        ('backend: "vllm" max_batch_size: 8', "has max_batch_size: 8"),
        ('backend: "vllm" model_transaction_policy { decoupled: false }', "not decoupled"),
        ('backend: "vl" "lm"', "cannot be edited"),
        ('backend: "vllm" parameters { value { string_value: "/x" } key: "EXECUTION_ENV_PATH" }', "cannot be edited"),
    ],
)
def test_what_cannot_be_rewritten_is_refused(text: str, said: str) -> None:
    """With the file and a remedy."""
    with pytest.raises(VllmEnvError, match=said) as caught:
        rewritten(text)
    assert caught.value.what.startswith("config.pbtxt ")
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "instance_group [\n  {\n    count: 1 # mine\n  }\n]\n# count: 1",
            "instance_group [\n  {\n    count: 4 # mine\n  }\n]\n# count: 1",
        ),
        (
            "# count: 9\ninstance_group { kind: KIND_MODEL count : 2 }",
            "# count: 9\ninstance_group { kind: KIND_MODEL count : 4 }",
        ),
        ("instance_group { count: 4 }", "instance_group { count: 4 }"),
        (
            'parameters { key: "count" value { string_value: "count: 1" } } instance_group { count:1 secondary_devices { } }',
            'parameters { key: "count" value { string_value: "count: 1" } } instance_group { count:4 secondary_devices { } }',
        ),
    ],
)
def test_only_the_groups_count_is_replaced(before: str, after: str) -> None:
    """Comments, spaces and what only looks like the field stay."""
    assert with_count(FILE, before, 4) == after


@pytest.mark.parametrize(
    ("profile", "vllm", "count"),
    [("cuda", "0.33.0", 2), ("cuda", "0.28.0.dev3+g1a", 1), ("cuda", "0.28.1", 2), ("cuda", "0.11.2", 1), ("cpu", "0.33.0", 1)],
)
def test_a_new_models_count_is_what_its_engine_can_serve(profile: str, vllm: str, count: int) -> None:
    """Two on a GPU, if this vLLM can share an engine."""
    assert default_count(profile, vllm) == count


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name: "x"', "has 0 instance groups"),
        ("instance_group [{ count: 1 }, { count: 1 }]", "has 2 instance groups"),
        ("instance_group { kind: KIND_MODEL }", "cannot be edited: no count in it could be replaced by 4"),
        ("instance_group { count: x }", "as a model configuration"),
    ],
)
def test_a_count_that_cannot_be_set_is_refused(text: str, said: str) -> None:
    """With the file and a remedy."""
    with pytest.raises(VllmEnvError, match=said) as caught:
        with_count(FILE, text, 4)
    assert caught.value.what.startswith("config.pbtxt ")
    assert caught.value.remedy
