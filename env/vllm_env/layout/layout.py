"""What a layout is: how an environment is stored in a model's folder. One class for each, chosen once, by its name."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from vllm_env.base.workspace import Workspace
from vllm_env.prefix.prefix import Prefix


@dataclass(frozen=True)
class EnvironmentRecord:
    """A file of an environment: digest, size, and the members and bytes that it unpacks to; a folder has its ``key`` only."""

    name: str
    sha256: str = ""
    size: int = 0
    members: int = 0
    unpacked: int = 0
    key: str = ""


@dataclass(frozen=True)
class Packed:
    """An environment as its layout stores it, in the cache or in a model's folder.

    ``records`` begin with what ``path`` is, which is what Triton is told of; its ``unpacked`` is the whole environment's.
    """

    path: Path
    records: tuple[EnvironmentRecord, ...]
    reused: bool = False

    @property
    def environment(self) -> EnvironmentRecord:
        """The record of ``path``."""
        return self.records[0]

    @property
    def identity(self) -> str:
        """What tells the environment from others: its digest, or the key of its folder."""
        return self.environment.sha256 or self.environment.key


@dataclass(frozen=True)
class Tree:
    """An unpacked environment; one that is not ``complete`` has an interpreter and nothing of vLLM."""

    path: Path
    complete: bool = True


class Layout(ABC):
    """How an environment is stored."""

    name: ClassVar[str]
    """As the user gives it and as the manifest has it."""
    environment: ClassVar[str]
    """The name that config.pbtxt gives to Triton."""
    files: ClassVar[tuple[str, ...]]
    """All that it places in a model's folder, in the order of renaming."""

    @abstractmethod
    def key(self, prefix_key: str) -> str:
        """Return the content key of what :meth:`pack` makes of the prefix with this key."""

    @abstractmethod
    def pack(self, workspace: Workspace, prefix: Prefix) -> Packed:
        """Return what the cache has of a prefix, or make it; VllmEnvError if there is too little space for it."""

    def load(self, model: Path, records: tuple[EnvironmentRecord, ...]) -> Packed:
        """Return what a model's folder holds, by the records of its manifest."""
        return Packed(model / self.environment, records)

    @abstractmethod
    def open(self, workspace: Workspace, packed: Packed, triton: Path | None, scratch: Path) -> Iterator[Tree]:
        """Unpack as a server does and yield each tree as soon as it is there, so that it can be checked.

        The libarchive of the Triton root is used if it brings one. VllmEnvError if Triton would refuse what is packed.
        """

    @abstractmethod
    def place(self, environment: Path, folder: Path, *, linked: bool = False) -> None:
        """Write an environment of the cache into a model's folder, readable for the server's user.

        ``linked`` allows hard links everywhere, for a folder that nobody will edit.
        """

    @abstractmethod
    def bytes_to_copy(self, environment: Path, receiver: Path) -> int:
        """Return what :meth:`place` takes of the receiving folder's file system."""

    def extracted_space(self, profile: str) -> int:
        """Return the bytes that Triton extracts to /tmp when it loads a model."""
        return 0

    def copied_space(self, profile: str) -> int:
        """Return the bytes that a model's folder takes for certain, as far as they are known before anything is made."""
        return 0
