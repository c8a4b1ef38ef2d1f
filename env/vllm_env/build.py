"""The build: its stages in their order. Each stage takes what the previous one returned."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_env.base import report
from vllm_env.base.command import COMMAND
from vllm_env.base.errors import UsageError
from vllm_env.base.filesystem import write_whole
from vllm_env.base.workspace import TEMPLATE, Workspace
from vllm_env.inside import parts_unpack
from vllm_env.layout.layout import Packed
from vllm_env.lock.pylock import Lock
from vllm_env.model.manifest import MANIFEST_NAME, Manifest, adopted_from, describe_build
from vllm_env.model.sbom import render_sbom
from vllm_env.plan import Plan, find_published, resolve
from vllm_env.prefix.file_owners import foreign_libraries
from vllm_env.prefix.prefix import Prefix, make_prefix
from vllm_env.publish.exchange import remove_abandoned_staging
from vllm_env.publish.model_config import (
    changes_count,
    default_count,
    has_configuration_of,
)
from vllm_env.publish.model_folder import BuiltSet, stage_candidate, write_engine_args
from vllm_env.publish.publish import publish
from vllm_env.serve.leftovers import server_runs
from vllm_env.serve.proof import state_before_run
from vllm_env.serve.smoke import SmokeResult
from vllm_env.serve.warm import Warmed, warm
from vllm_env.sketch import BuildRequest, check_server, make_sketch
from vllm_env.smoke_stage import SmokeStage
from vllm_env.triton.root import TritonRoot
from vllm_env.triton.stub import Stub, make_stub
from vllm_env.verify.together import beside
from vllm_env.verify.tree_rules import Expected
from vllm_env.verify.verify import opened, verified_mark, verify_tree


@dataclass(frozen=True)
class BuildResult:
    """The result of a build.

    Attributes:
        model: the published folder.
        manifest: the manifest in this folder.
        rebuilt: whether the build published something.
        triton: the Triton that can serve it.
        smoke: the smoke run's result; None without a smoke run.
        unserved: why there was no smoke run although the request allows one; else empty.
        warmed: the filled caches of vLLM; None without ``--warm``.
    """

    model: Path
    manifest: Manifest
    rebuilt: bool
    triton: TritonRoot
    smoke: SmokeResult | None = None
    unserved: str = ""
    warmed: Warmed | None = None


def build(workspace: Workspace, request: BuildRequest) -> BuildResult:
    """Build and publish the request.

    Raises:
        VllmEnvError: a stage failed; the model repository is unchanged.
    """
    with workspace.exclusive():
        for folder in workspace.cache.remove_abandoned():
            report.debug(f"removed {folder}, left by a build that was killed")
        sketch = make_sketch(workspace, request)
        if sketch.is_foreign:
            raise UsageError(
                f"--platform {sketch.spec.platform}: this machine cannot run that environment.",
                cause="A build starts its Python, and packs this machine's if conda-forge does not "
                "answer.",
                remedy="Build on such a machine. For its --offline --wheelhouse DIR, run here: "
                f"{COMMAND} wheelhouse DIR --platform {sketch.spec.platform}",
            )
        return _Build(workspace, resolve(workspace, sketch)).run()


@dataclass(frozen=True)
class _Build:
    """One running build."""

    workspace: Workspace
    plan: Plan

    @property
    def request(self) -> BuildRequest:
        """Return the request, without a smoke run if this machine cannot serve the model."""
        return self.plan.sketch.request

    @property
    def lock(self) -> Lock:
        """Return the exact files."""
        return self.plan.lock

    @property
    def _smoke_stage(self) -> SmokeStage:
        """Return the stage that serves the model and asks it."""
        return SmokeStage(self.workspace, self.plan, self._prefix)

    def run(self) -> BuildResult:
        """Build, check and publish the model, unless the published one is up to date.

        Raises:
            VllmEnvError: a stage failed; the model repository is unchanged.
        """
        target = self.request.model_folder
        published = find_published(target, self.plan.key)
        # The key does not tell that an adopted model has outdated code or configuration, or that
        # the user asks for another count of instances.
        outdated = self.request.adoption and self.request.adoption.outdated
        is_current = not outdated and not changes_count(target, self.request.count)
        if published and is_current:
            report.note(f"{target} is up to date; nothing to build")
            # A build that was killed after the exchange has published this model, and has left the
            # old files.
            remove_abandoned_staging(target.resolve().parent)
            # The model needs this file, and the user may have removed it.
            write_engine_args(TEMPLATE, target)
            smoke = None
            if self.request.smoke:
                smoke = self._smoke_stage.prove_again(target, published)
            result = self._result(target, published, smoke, rebuilt=False)
        else:
            result = self._rebuild()
        # Last: vLLM's caches go into the folder of the published model.
        if self.request.warm:
            result = dataclasses.replace(result, warmed=self._warm(result))
        return result

    def _rebuild(self) -> BuildResult:
        """Make all files of the model, check them, serve them in the smoke run, and publish them.

        Raises:
            VllmEnvError: a stage failed; nothing is published.
        """
        workspace = self.workspace
        request = self.request
        triton = self.plan.triton
        # make_sketch() has checked it for a build that starts a server in any case.
        if not self.plan.sketch.serves_anyway:
            check_server(request, self.lock.spec.profile)
        # 1) Make the files
        prefix = self._prefix()
        stub = self._stub(prefix)
        packed, standin = self._pack(prefix)
        built, manifest = self._describe(prefix, stub, packed)
        # 2) Check them. What is served is staged: a model that fails is not published.
        smoke = None
        before: dict[str, Any] = {}
        if request.smoke:
            with workspace.cache.staging() as staging:
                candidate = staging / request.model
                stage_candidate(built, request.model_folder, request.template, candidate)
                before = state_before_run(candidate, triton.path)

                def serve() -> SmokeResult:
                    # If the stand-in could not be made, result() raises the error.
                    standin_model = standin.result() if standin else None
                    return self._smoke_stage.run(candidate, prefix, standin_model)

                smoke = self._verify(stub, packed, serve)
        else:
            self._verify(stub, packed, serve=None)
        # 3) Publish them
        with report.stage("publish"):
            model = publish(workspace, built, request.repository, request.model, request.template)
            report.step(str(model))
        if smoke:
            self._smoke_stage.keep_proof(model, manifest, smoke, before)
        self._evict(prefix, packed)
        return self._result(model, manifest, smoke, rebuilt=True)

    def _describe(self, prefix: Prefix, stub: Stub, packed: Packed) -> tuple[BuiltSet, Manifest]:
        """Return the set to publish, and its manifest."""
        request = self.request
        source = request.adoption.source if request.adoption else None
        # A build for a model that was adopted earlier keeps the record of its source.
        origin = str(source) if source else adopted_from(request.model_folder)
        described = describe_build(self.plan.key, prefix, stub, request.layout, packed)
        manifest = dataclasses.replace(described, adopted_from=origin)
        built = BuiltSet(
            stub=stub.path,
            environment=packed.path,
            layout=request.layout,
            manifest=manifest.to_json(),
            sbom=render_sbom(self.lock, foreign_libraries(prefix.path), stub),
            adopted_from=source,
            stub_libraries=stub.libraries,
            count=request.count or self._first_instance_count(manifest),
        )
        return built, manifest

    def _evict(self, prefix: Prefix, packed: Packed) -> None:
        """Make room in the cache; keep what this build made, and what a server may read."""
        keep = {prefix.path.parent, packed.path}
        # A server marks its copy of vLLM's caches as used only when it starts. Weeks later, vLLM
        # still reads a file there when it meets a new shape.
        if server_runs():
            keep.update(self.workspace.cache.path("warm").glob("*"))
        self.workspace.cache.evict(keep)

    def _first_instance_count(self, manifest: Manifest) -> int:
        """Return the number of instances to set in config.pbtxt; 0 leaves the file as it is.

        Only the first build of a model sets it, and only if the user has not edited the file.
        """
        request = self.request
        is_first = not (request.model_folder / MANIFEST_NAME).exists()
        if request.adoption or not is_first:
            return 0
        if not has_configuration_of(request.template, request.model_folder):
            return 0
        return default_count(self.lock.spec.profile, manifest.vllm.version)

    def _result(
        self, model: Path, manifest: Manifest, smoke: SmokeResult | None, *, rebuilt: bool
    ) -> BuildResult:
        """Return the build's result from what differs between a new model and an unchanged one."""
        return BuildResult(
            model=model,
            manifest=manifest,
            rebuilt=rebuilt,
            triton=self.plan.triton,
            smoke=smoke,
            unserved=self.plan.sketch.unserved,
        )

    def _prefix(self) -> Prefix:
        """Return the conda prefix with the lock's wheels; make it if the cache does not have it."""
        with report.stage("prefix"):
            # Libraries that the environment lacks are taken from this Triton first.
            triton = self.plan.triton.path
            prefix = make_prefix(self.workspace, self.lock, self.request.keep, triton)
            step = f"{len(self.lock.wheels)} wheels, bytecode compiled"
            report.step("reused" if prefix.reused else step)
        return prefix

    def _stub(self, prefix: Prefix) -> Stub:
        with report.stage("stub"):
            stub = make_stub(self.workspace, self.plan.stub, prefix.path)
            report.step(f"{stub.origin}, Python {stub.python}, Triton {stub.release}")
        return stub

    def _pack(self, prefix: Prefix) -> tuple[Packed, Future[Path] | None]:
        """Pack the environment, and make the stand-in meanwhile if the smoke run will serve it.

        Returns:
            The packed environment, and the future of the stand-in's folder; None without it.
        """
        layout = self.request.layout
        with report.stage(layout.name):
            with self._smoke_stage.making_standin(prefix) as standin:
                packed = layout.pack(self.workspace, prefix)
            environment = packed.environment
            step = "the environment as it is"
            # An unpacked environment has no size of its own.
            if environment.size:
                reused = "reused, " if packed.reused else ""
                unpacked = f"{environment.unpacked / 1e9:.2f} GB unpacked"
                step = f"{reused}{environment.size / 1e6:.0f} MB, {unpacked}"
            report.step(step)
        return packed, standin

    def _verify(
        self, stub: Stub, packed: Packed, serve: Callable[[], SmokeResult] | None
    ) -> SmokeResult | None:
        """Check the environment unless it has passed before, and serve the model.

        Args:
            stub: the stub.
            packed: the environment.
            serve: does the smoke run; None if there is none. It runs at the same time as the
                checks if the disk space allows it.

        Returns:
            The result of ``serve``; None without it.

        Raises:
            VllmEnvError: a check or the smoke run failed.
        """
        workspace = self.workspace
        layout = self.request.layout
        lock = self.lock
        expected = Expected(
            stub.python, stub.release, lock.versions(), complete=True, profile=lock.spec.profile
        )
        # An empty file in the cache, if an environment has passed these checks.
        mark = verified_mark(workspace, packed.identity, stub.sha256, expected)
        # The smoke run of a thread, if it runs meanwhile.
        served = None
        with report.stage("verify"):
            if mark.is_file():
                report.step("passed before")
            else:
                triton = self.plan.triton
                keep = serve is not None
                with (
                    # 1) Open it as a server does. What passes stays where this user's servers look.
                    opened(workspace, layout, packed, expected, triton, keep=keep) as tree,
                    # 2) Check it, and serve the model meanwhile.
                    self._serving(serve) as served,
                ):
                    # A server needs a core for 17 s, so the checks leave it one. None: all cores.
                    spare = max(1, parts_unpack.cores() - 1) if served else None
                    notes = verify_tree(workspace, tree, expected, at_once=spare)
                # 3) Let the next build skip the checks, even if the smoke run fails. Without the
                # mark they run again: the cache also keeps an environment that failed.
                write_whole(mark, "")
                for note in notes:
                    report.note(note)
                report.step("loader rules, no path of the build, imports without activation")
        # The errors of the checks come first: they are closer to the cause.
        if served:
            return served.result()
        return serve() if serve else None

    def _serving(
        self, serve: Callable[[], SmokeResult] | None
    ) -> AbstractContextManager[Future[SmokeResult] | None]:
        """Serve the model in a thread while a block runs, and yield the future of the result.

        Yield None if there is nothing to serve, or if Triton extracts this layout: the block has
        already extracted it once, and the disk need not have the space for both.
        """
        if serve is None or self.request.layout.extracted_space(self.lock.spec.profile):
            return nullcontext()
        return beside(serve)

    def _warm(self, result: BuildResult) -> Warmed:
        """Load the published model once, so that vLLM fills the caches in the model's folder."""
        log = self.workspace.cache.path("warm-server.log")
        with report.stage("warm"):
            warmed = warm(self.workspace, result.triton.binary, result.model, log=log)
            size = f"{warmed.files} files, {warmed.size / 1e6:.0f} MB"
            report.step(f"ready after {warmed.ready_seconds:.0f} s, {size}")
        return warmed
