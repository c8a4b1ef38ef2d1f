"""Packs a prefix in parts: a small archive, which Triton extracts in a second, and what its start unpacks on all cores.

The small archive has the interpreter, its standard library and NumPy, which is what a stub imports before it calls the
model; the parts have the other packages (parts_unpack.py says how they are used).
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from vllm_env import inside
from vllm_env.base.cache import key_of, touch
from vllm_env.base.filesystem import file_sha256, put_in_place, require_space
from vllm_env.base.workspace import Workspace
from vllm_env.inside import parts_unpack
from vllm_env.prefix.prefix import Prefix
from vllm_env.prefix.relocate import site_packages

from .archive import LEFT_OUT, Archive, archive_key, plan_archive, write_archive
from .tar import TarPlan

_FORMAT = 1  # raise it when the bytes of a part change
_PART_BYTES = 128 * 2**20  # unpacked; a larger file is a part of its own. 60 parts of 8 GB keep 16 cores busy to the end
_IN_BASE = ("00_vllm_env.pth", "_vllm_env_", "numpy")  # beginnings of names in site-packages
_SOURCES = {name: inside.FOLDER / name for name in ("parts_finder.py", "parts_unpack.py")}
_PACKED_AS = {"parts_finder.py": "_vllm_env_parts.py", "parts_unpack.py": "_vllm_env_unpack.py"}


@dataclass(frozen=True)
class Part:
    """One ``NN.tar.gz``: its SHA-256, size in bytes, and the number of members and bytes that it unpacks to."""

    name: str
    sha256: str
    size: int
    members: int
    unpacked: int


@dataclass(frozen=True)
class PartedArchive(Archive):
    """A small archive with its parts; ``members`` is its own number of them, ``unpacked`` the bytes of all."""

    parts: tuple[Part, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the parts lie."""
        return self.path.with_name(self.path.name.removesuffix(".tar.gz") + ".parts")


@dataclass
class PartsPlan(TarPlan):
    """Plans the small archive and the parts at once; has the methods that conda-pack's ``Packer`` calls on its archives."""

    base: TarPlan = field(default_factory=lambda: TarPlan(LEFT_OUT))
    parts: list[TarPlan] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)

    def add(self, source: str, target: str) -> None:
        """Add the file, link or empty folder ``source`` as ``target``."""
        self._plan_for(target, Path(source).lstat().st_size).add(source, target)

    def add_bytes(self, source: str, data: bytes, target: str) -> None:
        """Add ``data`` as ``target``, executable if ``source`` is."""
        self._plan_for(target, len(data)).add_bytes(source, data, target)

    def _plan_for(self, target: str, size: int) -> TarPlan:
        _, _, inside = target.partition("/site-packages/")
        name = inside.partition("/")[0]
        if not inside or name.startswith(_IN_BASE):
            return self.base
        module = name.partition(".")[0]
        if module.isidentifier() and module != "__pycache__" and (name == module or name.endswith((".py", ".so"))):
            self.modules.add(module)
        if not self.parts or (self.parts[-1].pieces and self.parts[-1].size + size > _PART_BYTES):
            self.parts.append(TarPlan())
        return self.parts[-1]


def parts_of(archive: Archive | None) -> Path | None:
    """Return the folder of an archive's parts if it has any."""
    return archive.folder if isinstance(archive, PartedArchive) else None


def parts_in(archive: Archive | None) -> tuple[Part, ...]:
    """Return an archive's parts if it has any."""
    return archive.parts if isinstance(archive, PartedArchive) else ()


def parts_key(prefix_key: str) -> str:
    """Return the content key of the small archive and the parts of a prefix with this key."""
    return key_of(_FORMAT, archive_key(prefix_key), [file_sha256(source) for source in _SOURCES.values()])


def packed_key(layout: str, prefix_key: str) -> str:
    """Return the content key of what a layout makes of a prefix with this key."""
    return parts_key(prefix_key) if layout == "parts" else archive_key(prefix_key)


def make_parts(workspace: Workspace, prefix: Prefix) -> PartedArchive:
    """Return a prefix's small archive and parts from the cache, or pack them; VllmEnvError if there is too little space."""
    key = parts_key(prefix.key)
    facts = workspace.cache.path("archives", f"{key}.json")
    target = facts.with_suffix(".tar.gz")
    known = _read(facts, target)
    if known:
        touch(facts)
        return known
    plan = PartsPlan()
    plan_archive(prefix.path, plan)
    unpacked = plan.base.size + sum(part.size for part in plan.parts)
    require_space(workspace.cache.root, unpacked // 2, "the archive")
    with workspace.cache.staging() as staging:
        parts = _write_parts(workspace, plan, staging / "parts")
        _describe(plan, prefix, parts, unpacked)
        digest = write_archive(plan.base, staging / target.name)
        size = (staging / target.name).stat().st_size
        made = PartedArchive(target, digest, size, plan.base.members, unpacked, parts=parts)
        document = {k: v for k, v in dataclasses.asdict(made).items() if k not in ("path", "reused")}
        (staging / facts.name).write_text(json.dumps(document))
        target.parent.mkdir(parents=True, exist_ok=True)
        put_in_place(staging / "parts", made.folder)
        (staging / target.name).replace(target)
        (staging / facts.name).replace(facts)
    return made


def _read(facts: Path, target: Path) -> PartedArchive | None:
    if not facts.is_file():
        return None
    document = json.loads(facts.read_text())
    parts = tuple(Part(**part) for part in document.pop("parts"))
    known = PartedArchive(target, **document, reused=True, parts=parts)
    files = {target: known.size, **{known.folder / part.name: part.size for part in parts}}
    return known if all(file.is_file() and file.stat().st_size == size for file, size in files.items()) else None


def _write_parts(workspace: Workspace, plan: PartsPlan, folder: Path) -> tuple[Part, ...]:
    folder.mkdir()
    folder.chmod(0o755)
    made = []
    for number, part in enumerate(plan.parts):
        file = folder / f"{number:03}.tar.gz"
        digest = write_archive(part, file)
        file.chmod(0o644)
        made.append(Part(file.name, digest, file.stat().st_size, part.members, part.size))
        workspace.console.step(f"part {number + 1} of {len(plan.parts)}", (number + 1) / len(plan.parts))
    return tuple(made)


def _describe(plan: PartsPlan, prefix: Prefix, parts: tuple[Part, ...], unpacked: int) -> None:
    """Add to the small archive what unpacks the parts; the folder's name is a digest of everything that it will hold."""
    packages = site_packages(prefix.path).relative_to(prefix.path)
    key = key_of(prefix.key, [part.sha256 for part in parts], plan.base.members, plan.base.size)
    listed = [dataclasses.asdict(part) for part in parts]
    document = {"key": key, "unpacked": unpacked, "parts": listed, "modules": sorted(plan.modules)}
    texts = {_PACKED_AS[name]: source.read_bytes() for name, source in _SOURCES.items()}
    texts["01_vllm_env_parts.pth"] = b"import _vllm_env_parts\n"
    texts[parts_unpack.DESCRIPTION] = json.dumps(document).encode()
    for name in parts_unpack.OWN:
        plan.base.add_bytes(str(Path(__file__)), texts[name], f"{packages}/{name}")
