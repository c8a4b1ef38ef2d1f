"""Distribute the files of models over the layers of an image, by how often they change.

A registry, a node and a pull know a layer by its digest. So a model with other engine arguments
adds some bytes, and one with another vLLM keeps torch's gigabytes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from vllm_env.layout.directory import Directory
from vllm_env.layout.tar import TarContents
from vllm_env.model.contents import paths_in
from vllm_env.model.files import OFFICIAL_ARGS_NAME, VERSION_FOLDER
from vllm_env.model.manifest import MANIFEST_NAME
from vllm_env.model.sbom import SBOM_NAME
from vllm_env.prefix.file_owners import Owned, read_installed
from vllm_env.prefix.relocate import site_packages
from vllm_env.triton.root import STUB_LIBRARIES, STUB_NAME

from .own_files import check_link

INTERPRETER, TORCH, WHEELS, VLLM, CODE_AND_STUB, SETTINGS = KINDS = (
    "interpreter", "torch", "wheels", "vllm", "code", "settings"
)  # fmt: skip
"""The kinds of layers; what changes least comes first."""
MODELS = "models"
"""The folder in the image: a model repository."""
# Of uncompressed bytes. Some registries take no more than 5 GB in one upload.
_LAYER_BYTES = 3_900_000_000
_TORCH = ("torch", "torchaudio", "torchvision")
# The beginnings of what torch needs of CUDA. It also needs small packages, which vLLM needs, too.
_CUDA = ("nvidia-", "cuda-", "triton")


@dataclass(frozen=True)
class Content:
    """A model as it will be in the image.

    Attributes:
        name: the model's name.
        folder: the model's folder on this machine.
        environment: its unpacked environment.
        vllm: the normalised name of vLLM's distribution.
        paths: the other files for the image, relative to ``folder``.
        replaced: the new content of some of ``paths``.
    """

    name: str
    folder: Path
    environment: Path
    vllm: str
    paths: tuple[str, ...]
    replaced: Mapping[str, bytes]


@dataclass
class Layer:
    """The tar archive of a layer, and its name for people."""

    name: str
    tar: TarContents


def plan_layers(contents: list[Content]) -> list[Layer]:
    """Return the layers of models, with the files of each sorted by path.

    Each model has its own layer of each kind; the kinds that change least come first.

    Raises:
        VllmEnvError: a link leads out of an environment.
    """
    layers: list[Layer] = []
    divided = [_by_kind(content) for content in contents]
    for kind in KINDS:
        for content, paths in zip(contents, divided, strict=True):
            name = kind if len(contents) == 1 else f"{content.name}: {kind}"
            layers += _layers_of(name, content, sorted(paths[kind]))
    return layers


def _by_kind(content: Content) -> dict[str, list[str]]:
    """Return the model's paths, relative to its folder in the image, by the kind of their layer.

    Raises:
        VllmEnvError: a link leads out of the environment.
    """
    paths: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for path in content.paths:
        paths[_kind_of_own(path)].append(path)
    packages = site_packages(content.environment).relative_to(content.environment).as_posix()
    kinds = _kinds_of_wheels(content)
    for path in paths_in(content.environment):
        if (content.environment / path).is_symlink():
            check_link(content.environment, path)
        kind = _kind_in_wheels(path, kinds)
        if not kind:
            # In site-packages, only the start-up hook is of no wheel. It changes with this tool.
            is_hook = path.startswith(f"{packages}/")
            kind = CODE_AND_STUB if is_hook else INTERPRETER
        paths[kind].append(f"{Directory.environment}/{path}")
    return paths


def _kind_of_own(path: str) -> str:
    """Return the kind of a file that is not in the environment: a build's, or the user's."""
    first = path.partition("/")[0]
    built = (VERSION_FOLDER, STUB_NAME, STUB_LIBRARIES, MANIFEST_NAME, SBOM_NAME)
    return CODE_AND_STUB if first in built and path != OFFICIAL_ARGS_NAME else SETTINGS


def _kinds_of_wheels(content: Content) -> dict[str, str]:
    """Return the kind of each file that a wheel lists, and of the folder of its metadata.

    The paths are relative to the environment.
    """
    packages = site_packages(content.environment)
    installed = {each.name: owned for each, owned in read_installed(packages).items()}
    of_torch = _required_by_torch(installed)
    kinds = {}
    # Sorted, because some wheels own the same file: the last one decides.
    for name in sorted(installed):
        kind = TORCH if name in of_torch else WHEELS
        if name == content.vllm:
            kind = VLLM
        for file in installed[name].files:
            # A wheel lists its programs as ../../../bin/NAME.
            place = (packages / file).resolve() if file.startswith("../") else packages / file
            path = place.relative_to(content.environment).as_posix()
            kinds[path] = kind
            # The folder counts as well: not all of its files are listed with a digest, such as
            # RECORD itself.
            metadata, _, rest = path.partition(".dist-info/")
            if rest:
                kinds[f"{metadata}.dist-info"] = kind
    return kinds


def _required_by_torch(installed: Mapping[str, Owned]) -> set[str]:
    """Return torch's wheels and those of CUDA that they require, directly or by one another."""
    found: set[str] = set()
    waiting = list(_TORCH)
    while waiting:
        name = waiting.pop()
        if name in found or name not in installed:
            continue
        found.add(name)
        for text in installed[name].requires:
            try:
                required = str(canonicalize_name(Requirement(text).name))
            except InvalidRequirement:
                # uv has accepted this metadata.
                continue
            if required.startswith(_CUDA):
                waiting.append(required)
    return found


def _kind_in_wheels(path: str, kinds: Mapping[str, str]) -> str:
    """Return the kind of the wheel that a path belongs to; "" if it is of no wheel.

    Args:
        path: a file of the environment.
        kinds: what :func:`_kinds_of_wheels` returns.
    """
    # Bytecode belongs to its source: pkg/__pycache__/mod.cpython-312.pyc to pkg/mod.py.
    folder, is_bytecode, name = path.partition("/__pycache__/")
    if is_bytecode:
        path = f"{folder}/{name.partition('.')[0]}.py"
    if path in kinds:
        return kinds[path]
    metadata, is_metadata, _ = path.partition(".dist-info/")
    return kinds.get(f"{metadata}.dist-info", "") if is_metadata else ""


def _layers_of(name: str, content: Content, paths: list[str]) -> Iterator[Layer]:
    """Yield the layers for paths: one, or several if it would become too large."""
    layer = Layer(name, TarContents())
    number = 1
    # The folders that the layer already has.
    folders: set[str] = set()
    for path in paths:
        source = content.folder / path
        inner = path.removeprefix(f"{Directory.environment}/")
        if inner != path:
            source = content.environment / inner
        if layer.tar.members and layer.tar.size + source.lstat().st_size > _LAYER_BYTES:
            yield layer
            number += 1
            layer = Layer(f"{name} {number}", TarContents())
            folders.clear()
        target = f"{MODELS}/{content.name}/{path}"
        # Add the folders above it, the outermost first. All get the mode of the model's folder, so
        # that they have the same one in each layer.
        for folder in reversed([parent.as_posix() for parent in Path(target).parents][:-1]):
            if folder not in folders:
                folders.add(folder)
                layer.tar.add(str(content.folder), folder)
        if path in content.replaced:
            layer.tar.add_bytes(str(source), content.replaced[path], target)
        else:
            layer.tar.add(str(source), target)
    if layer.tar.members:
        yield layer
