"""The layout ``parts``: a small archive, which Triton extracts in a second, and a folder of parts.

The small archive has the interpreter, its standard library and NumPy: a stub imports these before
it calls the model. The parts have the other packages. A model's start unpacks them on all cores
(inside/parts_unpack.py).
"""

import json
import os
import shutil
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from vllm_env import inside
from vllm_env.base import report
from vllm_env.base.cache import key_of
from vllm_env.base.errors import REBUILD_REMEDY
from vllm_env.base.filesystem import file_sha256, require_space, tree_size
from vllm_env.base.process import run
from vllm_env.base.workspace import Workspace
from vllm_env.inside import parts_unpack
from vllm_env.prefix.prefix import EXTRACTED_SPACE, Prefix
from vllm_env.prefix.relocate import site_packages

from .archive import Archive, place_file, unpack
from .cached import file_record, find_packed, keep_packed, parts_folder
from .layout import EnvironmentRecord, Packed, Tree
from .tar import LEFT_OUT, TarContents, contents_of, write_archive
from .unpacked import unpacked_for_servers

_FORMAT = 1  # raise it when the bytes of a part change
# Unpacked bytes. An environment of 8 GB has 60 parts, which keep 16 cores busy until the end.
_PART_BYTES = 128 * 2**20
# The beginnings of names in site-packages: NumPy and the start-up hook are in the small archive.
_IN_BASE = ("00_vllm_env.pth", "_vllm_env_", "numpy")
_UNPACKER = {
    "_vllm_env_parts.py": "parts_finder.py",
    "_vllm_env_unpack/__init__.py": "parts_unpack.py",
    "_vllm_env_unpack/parts_config.py": "parts_config.py",
    "_vllm_env_unpack/parts_places.py": "parts_places.py",
    "_vllm_env_unpack/parts_worker.py": "parts_worker.py",
}
"""The code that unpacks the parts: paths in the small site-packages, and files of inside/."""
# A stub imports NumPy before it calls the model. That must not unpack the parts.
_UNPACK = """
import json
import sys
import numpy
assert "_vllm_env_unpack" not in sys.modules
import _vllm_env_unpack
_vllm_env_unpack.unpack_into(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))
"""


class Parts(Archive):
    """A small archive with a folder of parts."""

    name = "parts"
    files = (parts_unpack.FOLDER, Archive.environment)

    def key(self, prefix_key: str) -> str:
        """Return the content key of the small archive and the parts."""
        # The small archive has the code that unpacks the parts.
        unpacker = [file_sha256(inside.FOLDER / source) for source in _UNPACKER.values()]
        return key_of(_FORMAT, super().key(prefix_key), unpacker)

    def pack(self, workspace: Workspace, prefix: Prefix) -> Packed:
        """Return a prefix's small archive and parts from the cache, or pack them."""
        key = self.key(prefix.key)
        cached = find_packed(workspace.cache, key, self.files)
        if cached:
            return replace(cached, prefix=prefix.path)
        contents = PartsContents()
        contents_of(prefix.path, contents)
        unpacked = contents.base.size + sum(part.size for part in contents.parts)
        # Half is an estimate.
        require_space(workspace.cache.root, unpacked // 2, "the archive")
        with workspace.cache.staging() as staging:
            file = staging / f"{key}.tar.gz"
            parts = _write_parts(contents, parts_folder(file))
            _add_unpacker(contents, prefix, parts, unpacked)
            digest = write_archive(contents.base, file)
            first = EnvironmentRecord(
                name=self.environment,
                sha256=digest,
                size=file.stat().st_size,
                members=contents.base.members,
                unpacked=unpacked,
            )
            kept = keep_packed(workspace.cache, file, (first, *parts))
            return replace(kept, prefix=prefix.path)

    def open(
        self, packed: Packed, triton: Path | None, scratch: Path, *, keep: bool = False
    ) -> Generator[Tree, None, None]:
        """Unpack the small archive as Triton does, and the parts as a model's start does.

        If the prefix is here, its files are compared with those of the parts, and linked.
        """
        parts = parts_folder(packed.path)
        # As in Archive.open().
        unpacked = packed.environment.unpacked or 5 * (tree_size(packed.path) + tree_size(parts))
        # A tenth more, for folders, the last blocks of files, and the small archive.
        require_space(scratch, unpacked * 11 // 10, "unpacking the parts")
        report.step("unpacked with libarchive")
        small = scratch / "0"
        unpack(packed.path, small, triton, packed.environment.members)
        yield Tree(small, complete=False)
        report.step("parts")
        unpack_into = partial(_unpack_parts, small, parts, packed.prefix)
        # Without a folder where servers look for it, unpack into the scratch folder.
        place: AbstractContextManager[Path | None] = nullcontext()
        if keep:
            place = unpacked_for_servers(small, unpack_into)
        with place as kept:
            whole = kept or scratch / "1"
            if not kept:
                whole.mkdir()
                unpack_into(whole)
            yield Tree(whole)

    def place(self, environment: Path, folder: Path, *, linked: bool = False) -> None:
        """Link the small archive and the parts, or copy them if they are on another file system."""
        super().place(environment, folder, linked=linked)
        target = folder / parts_unpack.FOLDER
        target.mkdir()
        for part in sorted(parts_folder(environment).iterdir()):
            place_file(part, target / part.name)
        shutil.copystat(parts_folder(environment), target)

    def bytes_to_copy(self, environment: Path, receiver: Path) -> int:
        """Return 0 if all files can be links to the cache's files."""
        archive = super().bytes_to_copy(environment, receiver)
        # The parts are on the same file system as the archive.
        if archive == 0:
            return 0
        return archive + tree_size(parts_folder(environment))

    def extracted_space(self, profile: str) -> int:
        """Return 0: the small archive needs little."""
        return 0

    def unpacked_space(self, profile: str) -> int:
        """Return the size of an environment."""
        return EXTRACTED_SPACE[profile]


@dataclass
class PartsContents(TarContents):
    """The contents of the small archive and the parts; conda-pack's ``Packer`` adds the files.

    Attributes:
        base: the contents of the small archive.
        parts: those of each part.
        modules: the modules and packages in the parts, by their top-level names.
    """

    base: TarContents = field(default_factory=lambda: TarContents(LEFT_OUT))
    parts: list[TarContents] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)

    def add(self, source: str, target: str) -> None:
        """Add the file, link or empty folder ``source`` as ``target``."""
        self._contents_for(target, Path(source).lstat().st_size).add(source, target)

    def add_bytes(self, source: str, data: bytes, target: str) -> None:
        """Add ``data`` as ``target``, executable if ``source`` is."""
        self._contents_for(target, len(data)).add_bytes(source, data, target)

    def _contents_for(self, target: str, size: int) -> TarContents:
        """Return where a file belongs: the small archive, the last part or a new part.

        Note its module in ``modules`` if it is in a part.

        Args:
            target: the file's path in the environment.
            size: its bytes.
        """
        # The first folder or file below site-packages; "" for a file outside of it.
        name = target.partition("/site-packages/")[2].partition("/")[0]
        if not name or name.startswith(_IN_BASE):
            return self.base
        # The import of these modules unpacks the parts (parts_finder.py). A name with a dot is a
        # file, or a folder such as torch-2.9.0.dist-info.
        module = name.partition(".")[0]
        is_module = name == module or name.endswith((".py", ".so"))
        if is_module and module.isidentifier() and module != "__pycache__":
            self.modules.add(module)
        last = self.parts[-1] if self.parts else None
        # So a file that is larger than a part has a part of its own.
        if last is None or last.size + size > _PART_BYTES:
            last = TarContents()
            self.parts.append(last)
        return last


def _write_parts(contents: PartsContents, folder: Path) -> tuple[EnvironmentRecord, ...]:
    """Write each part as a file of the new ``folder``, and return the files' records."""
    folder.mkdir()
    # Whatever the umask: the server may run as another user.
    folder.chmod(0o755)
    records = []
    for number, part in enumerate(contents.parts):
        file = folder / f"{number:03}.tar.gz"
        digest = write_archive(part, file)
        file.chmod(0o644)
        record = EnvironmentRecord(
            name=f"{parts_unpack.FOLDER}/{file.name}",
            sha256=digest,
            size=file.stat().st_size,
            members=part.members,
            unpacked=part.size,
        )
        records.append(record)
        report.step(
            f"part {number + 1} of {len(contents.parts)}", (number + 1) / len(contents.parts)
        )
    return tuple(records)


def _add_unpacker(
    contents: PartsContents, prefix: Prefix, parts: tuple[EnvironmentRecord, ...], unpacked: int
) -> None:
    """Add the code that unpacks the parts, and their list, to the small archive.

    ``unpacked`` is the size of the whole environment in bytes.
    """
    packages = site_packages(prefix.path).relative_to(prefix.path)
    document = {
        # The unpacked folder's name. Models with the same environment share the folder.
        "key": key_of(
            prefix.key, [part.sha256 for part in parts], contents.base.members, contents.base.size
        ),
        "unpacked": unpacked,
        "parts": [{"name": Path(part.name).name, **file_record(part)} for part in parts],
        "modules": sorted(contents.modules),
    }
    files = {name: (inside.FOLDER / source).read_bytes() for name, source in _UNPACKER.items()}
    files["01_vllm_env_parts.pth"] = b"import _vllm_env_parts\n"
    files[parts_unpack.DESCRIPTION] = json.dumps(document).encode()
    for name, data in files.items():
        # They get the mode of this very file, which is not executable.
        contents.base.add_bytes(__file__, data, f"{packages}/{name}")


def _unpack_parts(
    small: Path, parts: Path, prefix: Path | None, folder: Path, lock: int | None = None
) -> None:
    """Let the small archive's own code unpack the whole environment into an empty folder.

    Args:
        small: the extracted small archive.
        parts: the folder of the parts.
        prefix: what they were packed from; None if it is not here.
        folder: the empty folder.
        lock: the descriptor of a locked file, which stays open in each process that writes to the
            folder; None for no lock.
    """
    # Without those that are None: the code of an older model may not know both.
    options = {"lock": lock, "packed": prefix and str(prefix)}
    options = {name: value for name, value in options.items() if value is not None}
    # -B: bytecode written here would name this machine's folders, and become a part of the whole
    # environment.
    program = [small / "bin" / "python", "-B", "-c", _UNPACK]
    run(
        [*program, folder, parts, json.dumps(options)],
        what="unpack the parts",
        pass_fds=() if lock is None else (lock,),
        env={"PATH": os.defpath, "HOME": str(small.parent)},
        remedy=REBUILD_REMEDY,
    )
