"""What stands in for the stages of a build that take minutes; publishing, the manifest and the cache are real."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from support.patience import LIMIT
from support.small_build import small_lock
from vllm_env.base.errors import VllmEnvError
from vllm_env.build import BuildResult, build
from vllm_env.layout.layout import EnvironmentRecord, Layout, Packed
from vllm_env.plan import Plan
from vllm_env.prefix.prefix import Prefix
from vllm_env.serve.smoke import SmokeRequest, SmokeResult
from vllm_env.serve.warm import Warmed
from vllm_env.sketch import BuildRequest, Sketch, find_proof
from vllm_env.triton.root import TritonRoot, rules_of
from vllm_env.triton.stub import Stub, StubChoice
from vllm_env.triton.stub_source import StubOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vllm_env.base.workspace import Workspace
    from vllm_env.verify.tree_rules import Expected


@dataclass
class Stages:
    """Stands in for the long stages; ``called`` has their names in the order of the calls."""

    folder: Path
    key: str = "k"
    profile: str = "cpu"
    fails: str = ""
    unserved: str = ""
    hub: bool = True
    cached: bool = True
    error: BaseException = field(default_factory=lambda: VllmEnvError("It failed."))
    called: list[str] = field(default_factory=list)
    during: Callable[[], object] = lambda: None
    served: list[SmokeRequest] = field(default_factory=list)
    candidates: list[set[str]] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)
    verified: list[Packed] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    has_packed: threading.Event = field(default_factory=threading.Event)

    def _call(self, name: str) -> None:
        self.called.append(name)
        if name == self.fails:
            raise self.error

    def make_sketch(self, workspace: Workspace, request: BuildRequest) -> Sketch:
        """A sketch with a Triton that has a stub."""
        self._call("plan")
        stub = self.folder / "stub"
        stub.write_text("stub")
        if self.unserved:
            request = replace(request, smoke=False)
        spec = replace(small_lock().spec, profile=self.profile)
        triton = TritonRoot(self.folder / "triton", "24.10", rules_of("24.10"), {"3.11": stub})
        return Sketch(request, spec, triton, self.unserved, find_proof(workspace, request, triton))

    def resolve(self, workspace: Workspace, sketch: Sketch) -> Plan:
        """A plan with the stub of the Triton's own."""
        triton = sketch.triton
        planned = StubChoice(triton, "3.11.7", StubOptions(), triton.stubs["3.11"])
        return Plan(sketch, triton, replace(small_lock(), spec=sketch.spec), planned, self.key)

    def make_prefix(self, workspace: Workspace, lock: object, keep: tuple[str, ...], triton: Path) -> Prefix:
        """A prefix with an interpreter."""
        self._call("prefix")
        path = workspace.cache.path("prefixes", "p") / "env"
        (path / "bin").mkdir(parents=True, exist_ok=True)
        (path / "lib/python3.11/site-packages").mkdir(parents=True, exist_ok=True)
        (path / "bin" / "python").write_text("python")
        return Prefix(path, "p", small_lock(), (), reused=False)

    def has_prefix(self, workspace: Workspace, lock: object, keep: tuple[str, ...]) -> bool:
        """Whether the cache has the prefix still."""
        return self.cached

    def make_stub(self, workspace: Workspace, choice: StubChoice, prefix: Path) -> Stub:
        """The chosen one."""
        self._call("stub")
        self.has_packed.clear()
        assert choice.prebuilt
        libraries = self.folder / "stub_lib"
        libraries.mkdir(exist_ok=True)
        (libraries / "libpython3.11.so.1.0").write_text("python")
        return Stub(choice.prebuilt, "3.11", "24.10", hashlib.sha256(b"stub").hexdigest(), 4, "prebuilt", libraries)

    def pack(self, workspace: Workspace, prefix: Prefix) -> Packed:
        """A file in the cache, to which published models are links."""
        try:
            self._call("archive")
        finally:
            self.has_packed.set()
        path = workspace.cache.path("archives", f"{self.key}.tar.gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(self.key)
            path.with_name(f"{self.key}.json").write_text("{}")
        digest = hashlib.sha256(self.key.encode()).hexdigest()
        return Packed(path, (EnvironmentRecord("vllm_env.tar.gz", digest, path.stat().st_size, members=3, unpacked=10),))

    @contextlib.contextmanager
    def opened(
        self, workspace: Workspace, layout: Layout, packed: Packed, expected: Expected, triton: TritonRoot, *, keep: bool
    ) -> Iterator[Path]:
        """The packed file itself."""
        self.kept.append(keep)
        self.verified.append(packed)
        yield packed.path

    def verify_tree(self, workspace: Workspace, tree: Path, expected: Expected, at_once: int | None) -> tuple[str, ...]:
        """Has a note for the user about an archive."""
        self.expected.append(expected)
        self._call("verify")
        return ("a note",) if tree.is_file() else ()

    def ensure_standin(self, workspace: Workspace, python: Path) -> Path:
        """A folder."""
        # Both begin at the same time. The order of `called` must not depend on the machine.
        if threading.current_thread() is not threading.main_thread():
            assert self.has_packed.wait(LIMIT)
            if self.fails == "archive":
                raise self.error  # its program is ended with the failed packing
        self._call("stand-in")
        (self.folder / "standin").mkdir(exist_ok=True)
        return self.folder / "standin"

    def is_fetchable(self, workspace: Workspace, model: str) -> bool:
        """Whether a model hub answers."""
        return self.hub

    def smoke_run(self, workspace: Workspace, request: SmokeRequest) -> SmokeResult:
        """Look at what is served."""
        self.served.append(request)
        self.candidates.append({path.name for path in request.model_folder.iterdir()})
        self._call("smoke run")
        self.during()
        return SmokeResult(("PASS",), (("Hello", " there"),), 1.0, {"model": str(self.folder / "standin")})

    def warm(self, workspace: Workspace, binary: Path, model: Path, *, log: Path) -> Warmed:
        """Name the caches."""
        self._call("warm")
        assert (model / "vllm_env.json").is_file()
        return Warmed(model / "vllm_cache", 1, 1, 1.0)


def build_all(workspace: Workspace, request: BuildRequest) -> BuildResult:
    result = build(workspace, request)
    assert isinstance(result, BuildResult)
    return result
