"""The smoke run of a build: serve the model once, ask it, and keep its answers for later builds.

The engine needs a model with weights. Where the user has named none, that is the stand-in, a tiny
model with known answers, which the environment makes.
"""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vllm_env.base import report
from vllm_env.base.workspace import TEMPLATE, Workspace
from vllm_env.model.manifest import Manifest
from vllm_env.plan import Plan
from vllm_env.prefix.prefix import Prefix, has_prefix
from vllm_env.serve.proof import CLIENT, PROMPTS, remember, state_before_run
from vllm_env.serve.smoke import SmokeRequest, SmokeResult, copied, smoke_run
from vllm_env.serve.standin import FACTS, ensure_standin
from vllm_env.serve.without_hub import EXAMPLE_MODEL, is_fetchable, offer_standin, own_model
from vllm_env.sketch import BuildRequest, subject_of
from vllm_env.verify.together import beside


@dataclass(frozen=True)
class SmokeStage:
    """The smoke run of one build.

    Attributes:
        workspace: the cache and the network.
        plan: the plan of the build.
        make_prefix: returns the environment's prefix; makes it if the cache does not have it.
    """

    workspace: Workspace
    plan: Plan
    make_prefix: Callable[[], Prefix]

    @property
    def request(self) -> BuildRequest:
        """Return the request of the build."""
        return self.plan.sketch.request

    def making_standin(self, prefix: Prefix) -> AbstractContextManager[Future[Path] | None]:
        """Make the stand-in in a thread while a block runs, and yield the future of its folder.

        Yield None if the smoke run is left out, or may serve another model.
        """
        request = self.request
        # run() determines later what an adopted model serves.
        if not request.smoke or request.smoke_model or request.adoption:
            return nullcontext()
        # It takes one core for 4 s.
        return beside(partial(ensure_standin, self.workspace, prefix.python))

    def run(self, model: Path, prefix: Prefix | None, standin: Path | None = None) -> SmokeResult:
        """Serve a staged model, and ask it.

        Its engine loads the model that the user has named, else an adopted model's own, else the
        stand-in.

        Args:
            model: the folder of the staged model.
            prefix: the environment that makes the stand-in; None if the user has named a model.
            standin: the folder of the stand-in if it is made already.
        """
        workspace = self.workspace
        named = self.request.smoke_model
        adoption = self.request.adoption
        # The adopted model's own files, by path; empty if this machine cannot serve that model.
        own = own_model(workspace, adoption.own) if adoption and not named else {}
        needs_standin = not named and not own
        if prefix and needs_standin and not standin:
            with report.stage("stand-in"):
                standin = ensure_standin(workspace, prefix.python)
        log = workspace.cache.path("smoke-server.log")
        # The server appends to its log, and an error must not show another server's lines.
        log.unlink(missing_ok=True)
        # The first file of an adopted model holds its engine arguments.
        engine_model = standin or named or next(iter(own.values()))["model"]
        with report.stage("smoke run"):
            smoke = smoke_run(
                workspace,
                SmokeRequest(
                    binary=self.plan.triton.binary,
                    model_folder=model,
                    engine_model=str(engine_model),
                    own=own,
                    client=CLIENT,
                    prompts=PROMPTS,
                    log=log,
                    gpu=self.plan.lock.spec.profile == "cuda",
                    # Only the stand-in's answers are known.
                    expected=dict(FACTS) if standin else {},
                ),
            )
            report.step(f"ready after {smoke.ready_seconds:.0f} s, {len(smoke.answers)} answers")
        return smoke

    def prove_again(self, model: Path, manifest: Manifest) -> SmokeResult | None:
        """Return the kept smoke run of a published model; without one, serve the model again.

        Return None if the cache no longer has what makes the stand-in.
        """
        # The sketch has a proof only if nothing has changed since.
        if self.plan.sketch.proof:
            return self.plan.sketch.proof
        before = state_before_run(model, self.plan.triton.path)
        smoke = self._run_again(model)
        if smoke:
            self.keep_proof(model, manifest, smoke, before)
        return smoke

    def _run_again(self, model: Path) -> SmokeResult | None:
        """Serve a copy of a published model.

        Return None if the cache no longer has an environment to make the stand-in. It is made again
        only if the user has asked for the smoke run.
        """
        prefix = None
        if not self.request.smoke_model:
            # A container's cache may be gone.
            is_there = has_prefix(self.workspace, self.plan.lock, self.request.keep)
            if not is_there and not self.request.smoke_again:
                report.note(
                    "no smoke run: the cache no longer has an environment to make its stand-in"
                )
                return None
            prefix = self.make_prefix()
        with copied(self.workspace, model) as copy:
            return self.run(copy, prefix)

    def keep_proof(
        self, model: Path, manifest: Manifest, smoke: SmokeResult, before: dict[str, Any]
    ) -> None:
        """Keep the result of a smoke run for the next build with nothing to do.

        Args:
            model: the published model.
            manifest: its manifest.
            smoke: the result.
            before: the state of the files before the run. If the model differs from it now, the
                run was not of these files, and its result is not kept.
        """
        # The stand-in's name in the engine arguments belongs to the state that is kept.
        self._offer_standin(model, smoke)
        subject = subject_of(self.request, manifest, self.plan.triton)
        # The model is published. Without the proof, the next build only serves it again.
        try:
            if subject and state_before_run(model, subject.triton) == before:
                remember(self.workspace.cache, subject, smoke)
        except (OSError, ValueError) as error:
            report.debug(f"the answers of the smoke run are not kept: {error}")

    def _offer_standin(self, model: Path, smoke: SmokeResult) -> None:
        """If no model hub answers, let the model serve the stand-in for now.

        Do nothing if the user has named another model for the smoke run.
        """
        if self.request.smoke_model or is_fetchable(self.workspace, EXAMPLE_MODEL):
            return
        # Otherwise the second command of README.md would fail. A file that the user edited stays.
        if offer_standin(TEMPLATE, model, Path(smoke.engine_args["model"]), smoke.engine_args):
            report.note(
                f"{model}: no model hub answers: it serves the smoke run's stand-in "
                "until vllm_engine_args.json names your model"
            )
