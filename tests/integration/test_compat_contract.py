"""Every vLLM that we say we support has the names and keywords that the model would use there.

Reads the sources of other vLLM wheels with `ast`; nothing of them is imported, so one machine can check them all.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from triton_vllm.compat import OPTIONAL_PLACES, PLACES
from triton_vllm.loading.inspector import REGISTRY
from vllm_env.base.cache import cache_root
from vllm_env.lock.spec import Overrides, load_spec

VERSIONS = ("0.11.2", "0.14.1", "0.17.1", "0.20.2", "0.22.1", "0.24.0", "0.33.0")
PLATFORMS = ("manylinux1_x86_64", "manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64")

# class -> methods with the parameters that we pass (None: an attribute or property)
METHODS = {
    "vllm.v1.engine.async_llm.AsyncLLM": {
        "from_engine_args": ("engine_args", "usage_context"),
        "add_request": ("request_id", "prompt", "params", "lora_request", "priority"),
        "abort": ("request_id",),
        "add_lora": ("lora_request",),
        "get_supported_tasks": (),
        "shutdown": (),
        "errored": None,
        "output_processor": None,
    },
    "vllm.v1.engine.output_processor.RequestOutputCollector": {"put": ("output",), "get_nowait": ()},
}
# class -> fields that we read or set
FIELDS = {
    "vllm.outputs.RequestOutput": ("outputs", "finished", "prompt_token_ids", "prompt_logprobs", "num_cached_tokens"),
    "vllm.outputs.CompletionOutput": (
        *("index", "text", "token_ids", "logprobs", "cumulative_logprob"),
        *("finish_reason", "stop_reason"),
    ),
    "vllm.outputs.PoolingRequestOutput": ("outputs", "finished", "prompt_token_ids"),
    "vllm.outputs.PoolingOutput": ("data",),
    "vllm.logprobs.Logprob": ("logprob", "rank", "decoded_token"),
    "vllm.sampling_params.SamplingParams": ("n", "output_kind", "structured_outputs"),
    "vllm.sampling_params.RequestOutputKind": ("DELTA", "FINAL_ONLY"),
    "vllm.pooling_params.PoolingParams": ("task",),
    "vllm.usage.usage_lib.UsageContext": ("API_SERVER",),
    "vllm.engine.arg_utils.AsyncEngineArgs": ("model", "disable_log_stats", "enable_lora", "media_io_kwargs"),
    # who waits in vLLM's queue; without them only a stream's first output tells
    "vllm.v1.engine.output_processor.OutputProcessor": ("request_states", "parent_requests"),
    "vllm.v1.engine.output_processor.RequestState": ("is_prefilling",),
    "vllm.v1.engine.parallel_sampling.ParentRequest": ("child_requests",),
    "vllm.lora.request.LoRARequest": ("lora_name", "lora_int_id", "lora_path"),
}
# optional name -> the first version of VERSIONS that must have it
SINCE = {
    "parse_model_prompt": "0.20.2",
    "ChatParams": "0.20.2",
    "VLLMValidationError": "0.14.1",
    "ImageMediaIO": "0.11.2",
    "AudioMediaIO": "0.11.2",
    "VideoMediaIO": "0.11.2",
    "enable_envs_cache": "0.14.1",
    "disable_envs_cache": "0.20.2",
    "ThreadSafeHFTokenizerMixin": "0.22.1",
}
# What `triton_vllm.loading.inspector` counts on; without it a first start is only slower.
INSPECTION = (
    "_SUBPROCESS_COMMAND = [sys.executable, '-m', 'vllm.model_executor.models.registry']",
    "subprocess.run(_SUBPROCESS_COMMAND, input=input_bytes, capture_output=True)",
    "/ 'modelinfos'",
)
# What keeps long audio from being decoded (`triton_vllm.loading.audio`), and how we know vLLM's refusal (`compat.too_large`).
AUDIO = ("envs.VLLM_MAX_AUDIO_DECODE_DURATION_S", "Set VLLM_MAX_AUDIO_DECODE_DURATION_S to increase this limit.")
MEASURES_AUDIO, SOUND = "0.24.0", "vllm.multimodal.media.audio"
RENDERER = {
    "render_cmpl": ("prompts",),
    "render_cmpl_async": ("prompts",),
    "render_chat_async": ("conversations", "chat_params"),
}


class Sources:
    """The unpacked sources of one vLLM."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def module(self, name: str) -> ast.Module | None:
        """Return the parsed module, or None if there is none of this name."""
        base = self._root.joinpath(*name.split("."))
        path = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
        return ast.parse(path.read_text(encoding="utf-8")) if path else None

    def lacks(self, module: str, texts: tuple[str, ...]) -> list[str]:
        """Return which statements or calls the module does not have."""
        tree = self.module(module)
        written = ast.unparse(tree) if tree else ""
        return [text for text in texts if text not in written]

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return the module and node that define a name, following re-exports."""
        tree = self.module(module)
        for node in tree.body if tree else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
                return self.find(self._target(module, node), name)
        return None

    def _target(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.split(".")
        if not self._root.joinpath(*package).is_dir():
            package = package[:-1]
        return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])

    def members(self, qualified: str) -> dict[str, ast.AST]:
        """Return what a class and its bases define: methods, fields, enum members and attributes set in __init__."""
        module, _, name = qualified.rpartition(".")
        found = self.find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return {}
        where, node = found
        made: dict[str, ast.AST] = {}
        for base in node.bases:
            if isinstance(base, ast.Name):
                made |= self.members(f"{where}.{base.id}")
        for item in node.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                made[item.name] = item
                if item.name == "__init__":
                    made |= _set_on_self(item)
            elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                made[item.target.id] = item
            elif isinstance(item, ast.Assign):
                made |= {t.id: item for t in item.targets if isinstance(t, ast.Name)}
        return made


def _set_on_self(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.AST]:
    return {node.attr: node for node in ast.walk(function) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}


def _missing_parameters(function: ast.AST, wanted: tuple[str, ...]) -> list[str]:
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = function.args
    if arguments.kwarg is not None:
        return []
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return [name for name in wanted if name not in names]


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def problems(sources: Sources, version: str) -> list[str]:
    """Return what the model would use of a vLLM and would not find there."""
    found = []
    for name, places in (PLACES | OPTIONAL_PLACES).items():
        required = name in PLACES or (name in SINCE and _order(version) >= _order(SINCE[name]))
        if required and not any(sources.find(place, name) for place in places):
            found.append(f"{name} in {' or '.join(places)}")
    methods = dict(METHODS)
    if _order(version) >= _order(SINCE["ChatParams"]):
        methods["vllm.renderers.base.BaseRenderer"] = RENDERER
    for owner, wanted in methods.items():
        members = sources.members(owner)
        for method, parameters in wanted.items():
            if method not in members:
                found.append(f"{owner}.{method}")
            elif parameters:
                found.extend(f"{owner}.{method}({p}=)" for p in _missing_parameters(members[method], parameters))
    for owner, fields in FIELDS.items():
        members = sources.members(owner)
        found.extend(f"{owner}.{field}" for field in fields if field not in members)
    found.extend(f"{REGISTRY}: {text}" for text in sources.lacks(REGISTRY, INSPECTION))
    if _order(version) >= _order(MEASURES_AUDIO):
        found.extend(f"{SOUND}: {text}" for text in sources.lacks(SOUND, AUDIO))
    return found


def _pip() -> list[str]:
    """The test environment may be made by uv, without pip; then the machine's own is used."""
    for python in (sys.executable, shutil.which("python3") or "", "/usr/bin/python3"):
        if python and subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
            return [python, "-m", "pip"]
    pytest.skip("no pip to download wheels with")


def _fetch(version: str, distribution: str = "vllm") -> Path:
    """Return the directory with the sources of a vLLM, downloading its wheel once."""
    target = cache_root() / "contract" / (version if distribution == "vllm" else f"{distribution}-{version}")
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        platforms = [part for p in PLATFORMS for part in ("--platform", p)]
        abis = [part for abi in ("abi3", "cp38", "cp312", "none") for part in ("--abi", abi)]
        options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
        wanted = f"{distribution}=={version}"
        subprocess.run([*_pip(), "download", "-q", *options, *platforms, *abis, "-d", scratch, wanted], check=True)
        (wheel,) = Path(scratch).glob("vllm*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py")]
            archive.extractall(Path(scratch) / "sources", names)
        (Path(scratch) / "sources").rename(target)
    return target


def test_the_pinned_vllm_has_all_that_the_model_would_use():
    """The default pin of the CPU profile, which is what the end-to-end tests serve."""
    spec = load_spec("cpu", Overrides())
    assert problems(Sources(_fetch(spec.pin.value, spec.distribution)), spec.pin.value) == []


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_vllm_has_all_that_the_model_would_use(version):
    """Fails with the list of names, methods, keywords and fields that this version lacks."""
    assert problems(Sources(_fetch(version)), version) == []


def test_the_check_notices_what_is_missing(tmp_path):
    """On a vLLM without these files everything required is reported; so an empty list above means something."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "sampling_params.py").write_text("class SamplingParams:\n    n: int = 1\n    output_kind: int = 0\n")
    found = problems(Sources(tmp_path), "0.24.0")
    assert "vllm.sampling_params.SamplingParams.structured_outputs" in found
    assert "vllm.sampling_params.SamplingParams.n" not in found
    assert "vllm.v1.engine.async_llm.AsyncLLM.add_request" in found
    assert "AsyncLLM in vllm.v1.engine.async_llm" in found


def test_a_renamed_keyword_is_noticed(tmp_path):
    """A method that takes other parameters counts as missing them."""
    module = tmp_path / "vllm" / "v1" / "engine" / "async_llm.py"
    module.parent.mkdir(parents=True)
    module.write_text("class AsyncLLM:\n    async def abort(self, request): ...\n")
    found = problems(Sources(tmp_path), "0.11.2")
    assert "vllm.v1.engine.async_llm.AsyncLLM.abort(request_id=)" in found
