"""Turn the options into a request and a workspace."""

import argparse
import os

from vllm_env.base.cache import Cache, cache_root, settle_home
from vllm_env.base.command import COMMAND
from vllm_env.base.errors import UsageError, meant
from vllm_env.base.network import Network, read_pip_config
from vllm_env.base.workspace import PLACE, Workspace
from vllm_env.inside import parts_places
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.lock.lock import LockOptions
from vllm_env.lock.spec import PIN_OPTIONS, Overrides, Pin
from vllm_env.lock.variants import variant_of
from vllm_env.prefix.prune import RULES
from vllm_env.sketch import BuildRequest
from vllm_env.triton.stub_source import StubOptions


def request_of(options: argparse.Namespace) -> BuildRequest:
    """Return the request of the options.

    Raises:
        UsageError: the value of an option is wrong.
    """
    # argparse cannot check these. A wrong value must be reported before any work begins.
    if options.wheelhouse and not options.wheelhouse.is_dir():
        raise UsageError(
            f"--wheelhouse {options.wheelhouse} is not a folder.",
            remedy=f"Fill one: {COMMAND} wheelhouse DIR.",
        )
    rules = [rule.name for rule in RULES]
    for name in options.keep:
        if name not in rules:
            raise UsageError(f"--keep {name} names no rule.", remedy=meant(name, rules))
    pin = None
    for kind, option in PIN_OPTIONS.items():
        # argparse stores --vllm-commit as ``vllm_commit``, and lets the user give only one of them.
        if value := getattr(options, option[2:].replace("-", "_")):
            pin = Pin(kind, value)
    return BuildRequest(
        profile=options.profile,
        overrides=Overrides(
            pin=pin,
            python=options.python,
            distribution=options.distribution,
            torch_backend=variant_of(options.cuda) if options.cuda else None,
            packages=tuple(options.packages),
            wheel_index=options.wheel_index,
            git_url=options.git_url,
            triton_release=options.triton_release,
        ),
        spec_file=options.spec,
        platform=options.platform or "",
        triton_root=options.triton_root,
        stub=options.stub,
        stub_options=StubOptions.of(options.triton_git_url, options.boost_url, options.jobs),
        layout=LAYOUTS[options.layout],
        repository=(options.model_repository or BuildRequest.repository).absolute(),
        model=options.model,
        lock=LockOptions(locked=options.locked, upgrade=options.upgrade, save=options.save),
        keep=tuple(options.keep),
        smoke=not options.no_smoke_run,
        smoke_again=options.smoke_run,
        smoke_model=options.smoke_model,
        warm=options.warm,
        count=options.count,
    )


def open_workspace(options: argparse.Namespace) -> Workspace:
    """Return the workspace of a run: the user's cache and the network that the options allow."""
    # Also for an installed wheel, which has no bootstrap that would have done this.
    settle_home(PLACE / ".tools" / "cache", parts_places.without_home())
    network = Network(
        pip=read_pip_config(),
        offline=options.offline,
        wheelhouse=options.wheelhouse,
        torch_index=os.environ.get("VLLM_ENV_TORCH_INDEX", ""),
    )
    # Some subcommands have no --dry-run.
    only_read = "dry_run" in options and options.dry_run
    return Workspace(Cache(cache_root(only_read=only_read)), network)
