"""``export``: the image that it writes, read as a registry, a container engine and KServe read it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zstandard

from support import small_model
from support.small_model import SITE
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.machine import EPOCH
from vllm_env.cli.main import main
from vllm_env.export import layers as layers_module
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.model.files import check_model
from vllm_env.model.manifest import check_files, read_manifest

pytestmark = pytest.mark.long

ENV = "models/vllm/vllm_env"


@dataclass(frozen=True)
class Image:
    """An image layout in a folder."""

    folder: Path

    @property
    def index(self) -> dict[str, Any]:
        """Its only manifest's descriptor."""
        (described,) = json.loads((self.folder / "index.json").read_bytes())["manifests"]
        return dict(described)

    @property
    def manifest(self) -> dict[str, Any]:
        return dict(json.loads(self.blob(self.index)))

    @property
    def config(self) -> dict[str, Any]:
        return dict(json.loads(self.blob(self.manifest["config"])))

    @property
    def layers(self) -> dict[str, str]:
        """The digests of its layers by their names."""
        names = [entry["created_by"].removeprefix("vllm-env export: ") for entry in self.config["history"]]
        return dict(zip(names, [layer["digest"] for layer in self.manifest["layers"]], strict=True))

    def path(self, digest: str) -> Path:
        algorithm, _, value = digest.partition(":")
        return self.folder / "blobs" / algorithm / value

    def blob(self, descriptor: dict[str, Any]) -> bytes:
        """A blob, which has the digest and the size of its descriptor."""
        data = self.path(descriptor["digest"]).read_bytes()
        assert descriptor["digest"] == f"sha256:{hashlib.sha256(data).hexdigest()}"
        assert descriptor["size"] == len(data)
        return data

    def members(self, layer: str) -> list[tarfile.TarInfo]:
        """The members of a layer, as Python reads them from a stream: one gzip member only."""
        with self.path(self.layers[layer]).open("rb") as file, tarfile.open(fileobj=file, mode="r|gz") as tar:
            return list(tar)

    def names(self, layer: str) -> set[str]:
        return {member.name for member in self.members(layer) if not member.isdir()}

    def extract(self, folder: Path) -> Path:
        """Extract it as KServe does; return the model's folder."""
        for digest in self.layers.values():
            with self.path(digest).open("rb") as file, tarfile.open(fileobj=file, mode="r|gz") as tar:
                tar.extractall(folder, filter="data")
        return folder / "models/vllm"


def export(models: Path, folder: Path, *options: str) -> Image:
    assert main(["export", "--oci", str(folder), "--model-repository", str(models), *options]) == 0
    return Image(folder)


@pytest.fixture(scope="module")
def prefix(bare_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small environment."""
    return small_model.make_prefix(bare_prefix, tmp_path_factory.mktemp("export") / "env")


@pytest.fixture(scope="module")
def models(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with it; read it, do not change it."""
    return small_model.publish(prefix, "parts", tmp_path_factory.mktemp("parts")).parent


@pytest.fixture(scope="module")
def image(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Its image; read it, do not change it."""
    return export(models, tmp_path_factory.mktemp("image"))


@pytest.fixture
def own(models: Path, tmp_path: Path) -> Path:
    """A model's folder of a test's own."""
    return Path(shutil.copytree(models / "vllm", tmp_path / "models/vllm"))


def test_each_digest_and_size_is_right(image: Image) -> None:
    """From the index to the layers; there is nothing else in the folder."""
    assert {path.name for path in image.folder.iterdir()} == {"blobs", "index.json", "oci-layout", "Dockerfile"}
    assert json.loads((image.folder / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    manifest, config = image.manifest, image.config
    for layer, contents in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True):
        assert layer["mediaType"] == "application/vnd.oci.image.layer.v1.tar+gzip"
        reader = zlib.decompressobj(31)
        data = reader.decompress(image.blob(layer))
        assert (reader.eof, reader.unused_data) == (True, b"")
        assert contents == f"sha256:{hashlib.sha256(data).hexdigest()}"
    blobs = {image.path(part["digest"]) for part in (image.index, manifest["config"], *manifest["layers"])}
    assert set((image.folder / "blobs/sha256").iterdir()) == blobs
    assert image.index["annotations"] == {"org.opencontainers.image.ref.name": "0.99.0-cpu"}


def test_the_labels_say_what_is_in_it(image: Image) -> None:
    """OCI's own, and the versions; in the configuration and as annotations."""
    labels = image.config["config"]["Labels"]
    assert labels == image.manifest["annotations"]
    assert image.config["created"] == "2026-01-01T00:00:00+00:00"
    standard, own = (
        {name.removeprefix(start): value for name, value in labels.items() if name.startswith(start)}
        for start in ("org.opencontainers.image.", "vllm-env.")
    )
    assert standard == {
        "title": "vLLM as a Triton model",
        "description": "vLLM 0.99.0+cpu for Triton 24.10, to mount next to it",
        "version": "0.99.0+cpu",
        "created": "2026-01-01T00:00:00+00:00",
    }
    assert own == {"vllm": "0.99.0+cpu", "triton": "24.10", "python": "3.11.7", "profile": "cpu", "lock": "c"}


def test_a_layer_has_what_changes_together(image: Image) -> None:
    """The interpreter, torch with what it needs of CUDA, other wheels, vLLM, our code, settings; bytecode is with its source."""
    assert list(image.layers) == ["interpreter", "torch", "wheels", "vllm", "code", "settings"]
    wheels = {
        layer: {name.split("/")[6] for name in image.names(layer) if name.startswith(f"{ENV}/{SITE}/")} for layer in image.layers
    }
    assert wheels["interpreter"] == wheels["settings"] == set()
    assert wheels["torch"] == {"torch", "torch-1.0.dist-info", "nvidia_cublas_cu13", "nvidia_cublas_cu13-1.0.dist-info"}
    assert wheels["wheels"] == {"numpy", "numpy-1.0.dist-info", "nvidia_cutlass_dsl", "nvidia_cutlass_dsl-1.0.dist-info"}
    assert wheels["vllm"] == {"vllm", "vllm-1.0.dist-info"}
    assert {"00_vllm_env.pth", "_vllm_env_runtime.py"} <= wheels["code"]
    of_vllm = {name.removeprefix(f"{ENV}/{SITE}/") for name in image.names("vllm")}
    assert {"vllm-1.0.dist-info/RECORD", "vllm/__pycache__/__init__.cpython-311.pyc"} <= of_vllm
    assert f"{ENV}/bin/python3.11" in image.names("interpreter")
    code = {name for name in image.names("code") if not name.startswith(f"{ENV}/")}
    built = {"1/model.py", "triton_python_backend_stub", "vllm_env.json", "vllm_env.cdx.json"}
    assert code == {f"models/vllm/{name}" for name in built}
    assert image.names("settings") == {"models/vllm/config.pbtxt", "models/vllm/vllm_engine_args.json"}


def test_members_are_the_same_on_every_machine(image: Image) -> None:
    """Sorted, folders before what they hold, of root, readable for all, with one time."""
    for layer in image.layers:
        members = image.members(layer)
        names = [member.name for member in members if not member.isdir()]
        assert names == sorted(names)
        seen = {"."}
        for member in members:
            assert str(Path(member.name).parent) in seen, member.name
            seen |= {member.name} if member.isdir() else set()
            assert (member.uid, member.gid, member.uname, member.gname, member.mtime) == (0, 0, "", "", EPOCH)
            assert member.mode in ((0o777,) if member.issym() else (0o644, 0o755))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_the_mounted_model_passes_its_checks(prefix: Path, layout: str, tmp_path: Path) -> None:
    """From any layout: it is an unpacked environment, its configuration names it, and its files are those of the manifest."""
    built = small_model.publish(prefix, layout, tmp_path / "built")
    model = export(built.parent, tmp_path / "image").extract(tmp_path / "mounted")
    manifest = read_manifest(model)
    assert manifest
    assert (manifest.layout, [record.name for record in manifest.environment]) == ("directory", ["vllm_env"])
    before = read_manifest(built)
    assert before
    assert manifest.key != before.key
    check_files(model, manifest)
    check_model(model, manifest)
    for path in prefix.rglob("*.py"):
        copy = model / "vllm_env" / path.relative_to(prefix)
        assert (copy.read_bytes(), copy.stat().st_mtime) == (path.read_bytes(), EPOCH)
    assert os.access(model / "vllm_env/bin/ray", os.X_OK)
    assert (built / "vllm_env.json").read_text() == before.to_json()


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (f"{SITE}/vllm/__init__.py", "vllm/__init__.py is changed"),
        (f"{SITE}/vllm/__pycache__/__init__.cpython-311.pyc", "does not match"),
        ("lib/python3.11/os.py", "does not match"),
        (f"{SITE}/new.py", "does not match"),
    ],
)
def test_one_changed_byte_is_found_in_the_mounted_model(image: Image, file: str, said: str, tmp_path: Path) -> None:
    """In a wheel's file, bytecode, the interpreter; also a file that is new or gone."""
    model = image.extract(tmp_path)
    manifest = read_manifest(model)
    assert manifest
    path = model / "vllm_env" / file
    old = path.read_bytes() if path.exists() else b""
    for new in (b"X" + old[1:], None):
        path.write_bytes(new) if new is not None else path.unlink()
        if new is None and not old:
            break
        with pytest.raises(VllmEnvError, match=said if new is not None else "is missing|does not match"):
            check_files(model, manifest)
    if old:
        path.write_bytes(old)
    check_files(model, manifest)


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_the_same_model_gives_the_same_image(
    models: Path, compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another folder, with another umask and times, on one core and on several."""
    first = export(models, tmp_path / "first", "--compression", compression)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/vllm").symlink_to(shutil.copytree(models / "vllm", tmp_path / "copy", copy_function=shutil.copyfile))
    (tmp_path / "copy/triton_python_backend_stub").chmod(0o755)
    before = os.umask(0o077)
    try:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)))
        second = export(tmp_path / "elsewhere", tmp_path / "second", "--compression", compression)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
        third = export(tmp_path / "elsewhere", tmp_path / "third", "--compression", compression)
    finally:
        os.umask(before)
    assert first.index == second.index == third.index
    assert {path.stat().st_mode & 0o777 for path in (second.folder, second.folder / "blobs/sha256")} == {0o755}


def test_zstd_has_the_same_contents(models: Path, image: Image, tmp_path: Path) -> None:
    """In one frame of each layer, with the media type that says so."""
    other = export(models, tmp_path / "image", "--compression", "zstd", "--tag", "v1")
    assert other.config["rootfs"] == image.config["rootfs"]
    assert other.index["annotations"] == {"org.opencontainers.image.ref.name": "v1"}
    for layer, contents in zip(other.manifest["layers"], other.config["rootfs"]["diff_ids"], strict=True):
        assert layer["mediaType"] == "application/vnd.oci.image.layer.v1.tar+zstd"
        data = zstandard.ZstdDecompressor().decompressobj().decompress(other.blob(layer))
        assert contents == f"sha256:{hashlib.sha256(data).hexdigest()}"


@pytest.mark.parametrize("arguments", ["vllm_engine_args.json", "1/model.json"])
def test_other_engine_arguments_change_one_layer(own: Path, image: Image, arguments: str, tmp_path: Path) -> None:
    """Whichever file has them; the layer is of a few bytes."""
    (own / "vllm_engine_args.json").unlink()
    (own / arguments).write_text('{"model": "Qwen/Qwen3-8B"}')
    other = export(own.parent, tmp_path / "image")
    assert {layer for layer in image.layers if other.layers[layer] != image.layers[layer]} == {"settings"}
    assert other.path(other.layers["settings"]).stat().st_size < 2000


def test_another_vllm_keeps_torch(prefix: Path, image: Image, tmp_path: Path) -> None:
    """Its own layer and that of the manifest change, and those of the wheels that it brings."""
    new = Path(shutil.copytree(prefix, tmp_path / "env", symlinks=True))
    small_model.add_wheel(new, "vllm", ("torch", "nvidia-cutlass-dsl"), version="2.0", line="NAME = 2\n")
    other = export(small_model.publish(new, "parts", tmp_path / "built").parent, tmp_path / "image")
    assert {layer for layer in image.layers if other.layers[layer] != image.layers[layer]} == {"vllm", "code"}
    small_model.add_wheel(new, "nvidia-cutlass-dsl", version="2.0", line="NAME = 2\n")
    other = export(small_model.publish(new, "parts", tmp_path / "again").parent, tmp_path / "third")
    assert {layer for layer in image.layers if other.layers[layer] != image.layers[layer]} == {"wheels", "vllm", "code"}


def test_a_large_layer_is_divided(models: Path, image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit that registries take; no file is lost."""
    monkeypatch.setattr(layers_module, "_LAYER_BYTES", 120_000)
    other = export(models, tmp_path / "image")
    torch = [layer for layer in other.layers if layer.startswith("torch")]
    assert torch == ["torch", "torch 2"]
    assert other.names("torch") | other.names("torch 2") == image.names("torch")
    assert not other.names("torch") & other.names("torch 2")
    assert other.extract(tmp_path / "mounted").is_dir()


def test_several_models_are_one_repository(
    models: Path, prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has its own layers, so a change of one adds none of the other."""
    own = Path(shutil.copytree(models, tmp_path / "models"))
    small_model.publish(prefix, "archive", tmp_path / "second").rename(own / "chat")
    options = ["--model-repository", str(own), "--model", "vllm", "--model", "chat", "--json"]
    assert main(["export", "--oci", str(tmp_path / "image"), *options]) == 0
    facts = json.loads(capsys.readouterr().out)
    image = Image(tmp_path / "image")
    assert [layer["name"] for layer in facts["layers"]] == list(image.layers)
    assert list(image.layers)[:4] == ["vllm: interpreter", "chat: interpreter", "vllm: torch", "chat: torch"]
    assert facts["digest"] == image.index["digest"]
    image.extract(tmp_path / "mounted")
    for name in ("vllm", "chat"):
        model = tmp_path / "mounted/models" / name
        manifest = read_manifest(model)
        assert manifest
        check_files(model, manifest)


def test_what_is_printed_can_be_typed(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The digest, and the lines that push it; and a Dockerfile of five lines, with the image of the release."""
    folder = tmp_path / "an image"
    image = export(models, folder, "--tag", "v1")
    out = capsys.readouterr().out.splitlines()
    assert f"{folder}: {image.index['digest']}" in out
    assert f"skopeo copy --preserve-digests 'oci:{folder}:v1' \"docker://$REGISTRY/vllm:v1\"" in out
    assert f"oras cp --from-oci-layout '{folder}:v1' \"$REGISTRY/vllm:v1\"" in out
    dockerfile = (folder / "Dockerfile").read_text().splitlines()
    assert len(dockerfile) == 5
    assert "FROM nvcr.io/nvidia/tritonserver:24.10-py3" in dockerfile


def test_weights_and_caches_stay_out_and_the_stand_in_does_not(
    own: Path, image: Image, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what editors, git and Python leave. Of weights there is a note, also if a link leads to them."""
    for name in (
        "weights/model.safetensors", "1/adapter/adapter_model.bin", "vllm_cache/warm.json",
        ".git/config", "1/__pycache__/model.cpython-311.pyc", ".config.pbtxt.swp",
        "standin/model.safetensors", "chat_template.jinja",
    ):  # fmt: skip
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text("x" * 1000)
    (own / "more.safetensors").symlink_to("/mnt/weights/more.safetensors")
    other = export(own.parent, tmp_path / "image")
    assert other.names("settings") - image.names("settings") == {
        f"models/vllm/{name}" for name in ("standin/model.safetensors", "chat_template.jinja")
    }
    assert other.layers["code"] == image.layers["code"]
    assert f"not in the image: {own}/1/adapter/adapter_model.bin and 3 more" in capsys.readouterr().err


def test_a_link_to_a_cache_stays_out(own: Path, image: Image, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It leads out of the model, as one to weights may."""
    (own / "vllm_cache").symlink_to("/mnt/cache")
    assert export(own.parent, tmp_path / "image").layers == image.layers
    assert f"not in the image: {own}/vllm_cache, 0 MB" in capsys.readouterr().err


def refused(models: Path, folder: Path, *options: str) -> int:
    """Export in vain: nothing new is in the folder, not even hidden; return the exit code."""
    before = sorted(folder.rglob("*")) if folder.exists() else None
    status = main(["export", "--oci", str(folder), "--model-repository", str(models), *options])
    assert (sorted(folder.rglob("*")) if folder.exists() else None) == before
    return status


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--model", "none"], 1, "holds no built environment"),
        (["--model", "vllm", "--model", "vllm"], 2, "Two models have the name vllm"),
        (["--tag", "a b"], 2, "--tag 'a b' is not a tag"),
        (["--tag", "x" * 129], 2, "is not a tag"),
    ],
)
def test_wrong_arguments_are_refused(
    models: Path, options: list[str], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one sentence, before anything is written."""
    assert refused(models, tmp_path / "image", *options) == status
    first, *_ = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in first


def test_the_folder_must_be_empty_and_writable(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is there is not touched. skopeo takes what follows a colon as the tag."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine").write_text("mine")
    assert refused(models, tmp_path / "there") == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert refused(models, Path("/proc/image")) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert refused(models, tmp_path / "a:b") == 2
    assert "has a colon" in capsys.readouterr().err


def test_models_of_two_releases_are_refused(
    models: Path, prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No server would load both."""
    own = Path(shutil.copytree(models, tmp_path / "models"))
    small_model.publish(prefix, "archive", tmp_path / "second", release="25.01").rename(own / "chat")
    assert refused(own, tmp_path / "image", "--model", "vllm", "--model", "chat") == 2
    assert "for Triton 24.10 and 25.01" in capsys.readouterr().err


def _for_arm(model: Path) -> None:
    manifest = json.loads((model / "vllm_env.json").read_text())
    manifest["spec"]["platform"] = "linux/arm64"
    (model / "vllm_env.json").write_text(json.dumps(manifest))


def test_the_image_is_for_the_models_platform(
    own: Path, prefix: Path, image: Image, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An archive is exported on any machine. Parts are unpacked by the environment's own Python, which does not start here."""
    assert _platforms(image) == [("linux", "amd64")] * 2
    _for_arm(own)
    assert refused(own.parent, tmp_path / "image") == 1
    assert "built for linux/arm64, and this machine is linux/amd64" in capsys.readouterr().err
    model = small_model.publish(prefix, "archive", tmp_path / "archive")
    _for_arm(model)
    assert _platforms(export(model.parent, tmp_path / "other")) == [("linux", "arm64")] * 2


def _platforms(image: Image) -> list[tuple[str, str]]:
    (described,) = json.loads((image.folder / "index.json").read_text())["manifests"]
    config = json.loads(image.blob(json.loads(image.blob(described))["config"]))
    return [(place["os"], place["architecture"]) for place in (described["platform"], config)]


def test_models_of_two_platforms_are_refused(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An image is for one."""
    _for_arm(Path(shutil.copytree(own, own.with_name("chat"))))
    assert refused(own.parent, tmp_path / "image", "--model", "vllm", "--model", "chat") == 2
    assert "for linux/amd64 and linux/arm64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "file"), [("parts", "vllm_env.parts/000.tar.gz"), ("directory", f"vllm_env/{SITE}/vllm/__init__.py")]
)
def test_files_that_differ_from_the_manifest_are_refused(
    prefix: Path, layout: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an unpacked environment, those of the wheels, of which their RECORD has digests."""
    model = small_model.publish(prefix, layout, tmp_path / "built")
    (model / file).write_bytes(b"X" + (model / file).read_bytes()[1:])
    assert refused(model.parent, tmp_path / "image") == 1
    assert f"error: {model / file} " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".env", "A=1"),
        ("conf/tls.key", "x"),
        ("1/id_rsa", "x"),
        ("secrets.yaml", "x"),
        ("notes.txt", "my token is hf_" + "a" * 34),
        ("1/triton_vllm/start.sh", "-----BEGIN OPENSSH PRIVATE KEY-----"),
        ("vllm_env.cdx.json", '{"url": "https://me:word@registry.example/simple"}'),
        ("vllm_engine_args.json", '{"hf_token": "anything"}'),
        ("config.pbtxt", 'backend: "python" parameters { key: "VLLM_API_KEY" value { string_value: "x" } }'),
    ],
)
def test_what_looks_like_a_secret_is_refused(
    own: Path, name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its name, its content or its field; an image is read by everybody who can pull it."""
    (own / name).parent.mkdir(parents=True, exist_ok=True)
    (own / name).write_text(text)
    assert refused(own.parent, tmp_path / "image") == 1
    said = capsys.readouterr().err
    assert f"error: {own / name} looks like a secret." in said
    assert "anything" not in said
    assert "hf_" + "a" * 34 not in said


@pytest.mark.parametrize("target", ["/etc/hostname", "../../outside", "nowhere", "vllm_engine_args.json"])
def test_links_that_an_image_would_not_have_are_refused(
    own: Path, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Absolute, out of the model, to nothing. One inside the model is kept."""
    (tmp_path / "outside").write_text("x")
    (own / "link").symlink_to(target)
    if target == "vllm_engine_args.json":
        model = export(own.parent, tmp_path / "image").extract(tmp_path / "mounted")
        assert (model / "link").readlink() == Path(target)
        return
    assert refused(own.parent, tmp_path / "image") == 1
    assert f"error: {own / 'link'} is a link to {target}" in capsys.readouterr().err


def test_a_link_out_of_the_environment_is_refused(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The user may have edited an unpacked one."""
    model = small_model.publish(prefix, "directory", tmp_path / "built")
    (model / "vllm_env/lib/outside").symlink_to("/etc")
    assert refused(model.parent, tmp_path / "image") == 1
    assert f"error: {model}/vllm_env/lib/outside is a link to /etc" in capsys.readouterr().err


def test_a_file_that_is_none_is_refused(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe would be read for ever."""
    os.mkfifo(own / "pipe")
    assert stat.S_ISFIFO((own / "pipe").stat().st_mode)
    assert refused(own.parent, tmp_path / "image") == 1
    assert f"error: {own / 'pipe'} is not a file" in capsys.readouterr().err


def test_an_environment_by_its_absolute_path_is_refused(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The image has another path. The build takes such a configuration."""
    config = own / "config.pbtxt"
    config.write_text(config.read_text().replace("$$TRITON_MODEL_DIRECTORY", str(own)))
    assert refused(own.parent, tmp_path / "image") == 1
    assert "EXECUTION_ENV_PATH is" in capsys.readouterr().err
