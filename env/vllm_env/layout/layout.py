"""The interface of a layout: one class for each way to store an environment in a model's folder."""

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from vllm_env.base.workspace import Workspace
from vllm_env.prefix.prefix import Prefix


@dataclass(frozen=True)
class EnvironmentRecord:
    """A file or folder of an environment. A folder has only a ``name`` and a ``key``.

    Attributes:
        name: path in the model's folder.
        sha256: hexadecimal digest.
        size: bytes.
        members: members of the archive.
        unpacked: bytes after unpacking.
        key: content key of a folder.
    """

    name: str
    sha256: str = ""
    size: int = 0
    members: int = 0
    unpacked: int = 0
    key: str = ""


@dataclass(frozen=True)
class Packed:
    """An environment as its layout stores it, in the cache or in a model's folder.

    The first record describes ``path``, which config.pbtxt names. Its ``unpacked`` is the size of
    the whole environment.
    """

    path: Path
    records: tuple[EnvironmentRecord, ...]
    reused: bool = False
    # What it was packed from, if that is here.
    prefix: Path | None = None

    @property
    def environment(self) -> EnvironmentRecord:
        """Return the record of ``path``."""
        return self.records[0]

    @property
    def identity(self) -> str:
        """Return what identifies the environment: its digest, or the key of its folder."""
        return self.environment.sha256 or self.environment.key


@dataclass(frozen=True)
class Tree:
    """An unpacked environment."""

    path: Path
    # If not, it is the small archive of `parts`: an interpreter without vLLM.
    complete: bool = True


class Layout(ABC):
    """One way to store an environment."""

    name: ClassVar[str]
    """The name on the command line and in the manifest."""
    environment: ClassVar[str]
    """The file or folder that config.pbtxt names."""
    files: ClassVar[tuple[str, ...]]
    """All files and folders that it places in a model's folder, in the order of renaming."""

    @abstractmethod
    def key(self, prefix_key: str) -> str:
        """Return the content key of the result of :meth:`pack` for the prefix with this key."""

    @abstractmethod
    def pack(self, workspace: Workspace, prefix: Prefix) -> Packed:
        """Return the packed prefix from the cache, or pack it.

        Raises:
            VllmEnvError: too little space is free.
        """

    def load(self, model: Path, records: tuple[EnvironmentRecord, ...]) -> Packed:
        """Return the environment in a model's folder; ``records`` are those of its manifest."""
        return Packed(model / self.environment, records)

    @abstractmethod
    def open(
        self, packed: Packed, triton: Path | None, scratch: Path, *, keep: bool = False
    ) -> Generator[Tree, None, None]:
        """Unpack as a server does, and yield each tree as soon as it exists, the complete one last.

        Args:
            packed: the packed environment.
            triton: a Triton root, whose own libarchive is used if it has one.
            scratch: the folder for the trees.
            keep: if a model's start unpacks the environment once per machine, do that for it. The
                result stays unless the generator is closed early.

        Raises:
            VllmEnvError: Triton would refuse the packed environment, or too little space is free.
        """

    @abstractmethod
    def place(self, environment: Path, folder: Path, *, linked: bool = False) -> None:
        """Write an environment of the cache into a model's folder, readable for the server's user.

        ``linked`` allows hard links for all files. Use it only for a folder that no user will edit.
        """

    @abstractmethod
    def bytes_to_copy(self, environment: Path, receiver: Path) -> int:
        """Return the bytes that :meth:`place` needs on the file system of ``receiver``."""

    def extracted_space(self, profile: str) -> int:
        """Return the bytes that Triton extracts to /tmp when it loads a model."""
        return 0

    def unpacked_space(self, profile: str) -> int:
        """Return the bytes that a model's start itself unpacks."""
        return 0

    def copied_space(self, profile: str) -> int:
        """Return the bytes that a model's folder needs at least, known before the build."""
        return 0
