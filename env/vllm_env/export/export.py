"""Export built models: check them, unpack their environments, and write the image."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from vllm_env.base import report
from vllm_env.base.cache import key_of
from vllm_env.base.errors import REBUILD_REMEDY, VllmEnvError
from vllm_env.base.filesystem import require_space
from vllm_env.base.new_folder import filled, prepare
from vllm_env.layout.directory import Directory
from vllm_env.model.contents import check_unpacked, record_of
from vllm_env.model.files import (
    CONFIG_NAME,
    ENVIRONMENT_PARAMETER,
    MODEL_DIRECTORY,
    check_model,
    encode_config,
    parse_config,
    read_config_text,
)
from vllm_env.model.manifest import MANIFEST_NAME, Manifest, check_files
from vllm_env.publish.model_folder import with_environment_path
from vllm_env.sketch import installed_triton
from vllm_env.triton.elsewhere import image_of

from .compression import COMPRESSIONS
from .image import INDEX, Image, WrittenLayer
from .layers import MODELS, Content, plan_layers
from .own_files import find_own_files
from .refusals import check_arguments

DOCKERFILE = "Dockerfile"
_DOCKERFILE = """\
ARG MODEL
FROM ${{MODEL}} AS model
FROM {base}
COPY --from=model /{models} /{models}
CMD ["tritonserver", "--model-repository=/{models}"]
"""
_OCI = "org.opencontainers.image"
# Compressed bytes that an uncompressed one needs at most, with the documents.
_WORST_RATIO = 1.01


@dataclass(frozen=True)
class Exported:
    """An image in a folder.

    Attributes:
        folder: the folder.
        digest: the image's digest, which a registry keeps.
        tag: the image's tag in the folder.
        layers: its layers.
        left_out: weights and caches of the models, which the image does not have.
    """

    folder: Path
    digest: str
    tag: str
    layers: tuple[WrittenLayer, ...]
    left_out: tuple[Path, ...]


def export(
    models: list[tuple[Path, Manifest]], folder: Path, *, compression: str = "gzip", tag: str = ""
) -> Exported:
    """Write models as an OCI image layout into a folder that is missing or empty.

    Args:
        models: each model's folder, whose name is the model's, and its manifest.
        folder: the folder for the image.
        compression: a name of ``COMPRESSIONS``.
        tag: the image's tag; "" for the first model's vLLM version.

    Raises:
        UsageError: an argument is wrong, or the models do not fit into one image.
        VllmEnvError: a model differs from its manifest, or has a file that does not belong into an
            image, or too little space is free.
    """
    folder = folder.absolute()
    # A tag cannot have the + of a local version.
    tag = tag or models[0][1].vllm.version.replace("+", "-")
    check_arguments(models, folder, tag)
    prepare(folder, INDEX)
    left_out: list[Path] = []
    with report.stage("export"):
        with filled(folder, INDEX) as (made, scratch):
            contents = []
            for number, (model, manifest) in enumerate(models):
                place = scratch / str(number)
                place.mkdir()
                content, others = _read_model(model, manifest, place)
                contents.append(content)
                left_out += others
            image = Image(
                made,
                COMPRESSIONS[compression],
                labels=_labels([manifest for _, manifest in models]),
                created=max(manifest.built_at for _, manifest in models),
                platform=models[0][1].platform,
            )
            digest = _write_image(image, contents, tag)
            base = image_of(models[0][1].triton_release)
            text = _DOCKERFILE.format(base=base, models=MODELS)
            (made / DOCKERFILE).write_text(text, "utf-8")
        size = sum(layer.size for layer in image.layers)
        report.step(f"{folder}, {size / 1e6:.0f} MB")
    return Exported(folder, digest, tag, tuple(image.layers), tuple(left_out))


def _read_model(model: Path, manifest: Manifest, scratch: Path) -> tuple[Content, list[Path]]:
    """Check and unpack a model.

    Args:
        model: the model's folder.
        manifest: its manifest.
        scratch: an empty folder for the unpacked environment.

    Returns:
        Its content for the image, and its weights and caches, which the image does not have.

    Raises:
        VllmEnvError: the model differs from its manifest, or has a file that must not be in it.
    """
    name = model.name
    # The user may keep the model elsewhere and link to it.
    model = model.resolve()
    report.step(f"{name}: digests")
    own = find_own_files(model)
    check_files(model, manifest)
    check_model(model, manifest)
    config = _exported_config(model)
    report.step(f"{name}: unpacking")
    layout, packed = manifest.packed(model)
    # open() yields the parts of an environment as they are unpacked, and the whole one last.
    *_, tree = layout.open(packed, installed_triton(), scratch)
    # A build records no digest of an unpacked folder, so check_files() has not checked it.
    if layout.name == Directory.name and not manifest.named.sha256:
        check_unpacked(tree.path, REBUILD_REMEDY)
    exported = dataclasses.replace(
        manifest,
        # Another set than the one that was built: a build does not take it for its own.
        key=key_of("exported", manifest.key),
        layout=Directory.name,
        environment=(record_of(tree.path, Directory.environment),),
    )
    replaced = {CONFIG_NAME: config, MANIFEST_NAME: exported.to_json().encode()}
    content = Content(
        name=name,
        folder=model,
        environment=tree.path,
        vllm=str(canonicalize_name(manifest.vllm.distribution)),
        paths=own.paths,
        replaced=replaced,
    )
    return content, [model / path for path in own.left_out]


def _exported_config(model: Path) -> bytes:
    """Return a model's configuration with the environment of the image.

    Raises:
        VllmEnvError: it names the environment in a way that cannot be replaced.
    """
    file = model / CONFIG_NAME
    text = with_environment_path(read_config_text(file), Directory.environment)
    path = parse_config(file, text).parameters[ENVIRONMENT_PARAMETER].string_value
    expected = f"{MODEL_DIRECTORY}/{Directory.environment}"
    if path != expected:
        raise VllmEnvError(
            f"{file}: {ENVIRONMENT_PARAMETER} is {path!r}, which an image does not have.",
            remedy=f'Write "{MODEL_DIRECTORY}/" and the name of the environment there.',
        )
    return encode_config(text)


def _write_image(image: Image, contents: list[Content], tag: str) -> str:
    """Write the layers and documents of an image; return its digest.

    Raises:
        VllmEnvError: too little space is free, or a link leads out of an environment.
    """
    layers = plan_layers(contents)
    # Uncompressed bytes.
    total = sum(layer.tar.size for layer in layers)
    require_space(image.folder.parent, int(total * _WORST_RATIO), "the image")
    written = 0
    for layer in layers:
        for done_of_layer in image.add(layer):
            report.step(layer.name, (written + done_of_layer) / total)
        written += layer.tar.size
    return image.finish(tag)


def _labels(manifests: list[Manifest]) -> dict[str, str]:
    """Return OCI's standard labels and our own; values of several models are joined."""

    def joined(values: list[str]) -> str:
        # Each value once, and no empty ones.
        return ", ".join(dict.fromkeys(filter(None, values)))

    versions = joined([manifest.vllm.version for manifest in manifests])
    release = manifests[0].triton_release
    labels = {
        f"{_OCI}.title": "vLLM as a Triton model",
        f"{_OCI}.description": f"vLLM {versions} for Triton {release}, to mount next to it",
        f"{_OCI}.version": versions,
        f"{_OCI}.created": max(manifest.built_at for manifest in manifests),
        f"{_OCI}.revision": joined([manifest.vllm.commit for manifest in manifests]),
        "vllm-env.vllm": versions,
        "vllm-env.triton": release,
        "vllm-env.python": joined([manifest.python for manifest in manifests]),
        "vllm-env.profile": joined([str(m.spec.get("profile", "")) for m in manifests]),
        "vllm-env.lock": joined([manifest.lock_digest for manifest in manifests]),
    }
    # A release has no revision.
    return {name: value for name, value in labels.items() if value}
