"""vLLM's own index, which has commits and CUDA variants; the sources of a commit from git."""

import re
from collections.abc import Sequence
from pathlib import Path

from vllm_env.base.cache import key_of
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.filesystem import put_in_place
from vllm_env.base.machine import AMD64
from vllm_env.base.network import NetworkError
from vllm_env.base.process import run
from vllm_env.base.sources import masked
from vllm_env.base.workspace import Workspace

from .platforms import pip_options, platform_tags
from .spec import Spec
from .variants import cuda_of
from .wheels import cached_wheel, keep_wheel

_WHEEL_INDEX = "https://wheels.vllm.ai"
_GIT_URL = "https://github.com/vllm-project/vllm.git"
# Of the wheels that the index has; a lock's other wheels are chosen for the C library of Triton.
_NEWEST_GLIBC = 35
_FETCH_REMEDY = "Check the SHA and --git-url, and that this machine can reach that address."
# git's words for a repository that answers and does not have the commit.
_NO_SUCH_COMMIT = r"not our ref|unadvertised object|find remote ref"


def index_of(spec: Spec) -> str:
    """Return the base of vLLM's own index, which has a folder for each commit and release."""
    return (spec.wheel_index or _WHEEL_INDEX).rstrip("/")


def variant_index(spec: Spec) -> str:
    """Return the index that has a release's wheel for a CUDA variant; "" for any other pin."""
    if spec.pin.kind != "release" or not cuda_of(spec.torch_backend):
        return ""
    return f"{index_of(spec)}/{spec.pin.value}/{spec.torch_backend}"


def git_url_of(spec: Spec) -> str:
    """Return the git repository of commits."""
    return spec.git_url or _GIT_URL


def commit_wheel_folder(workspace: Workspace, spec: Spec) -> Path:
    """Return the cache entry of the wheel that the index has of a commit."""
    parts = [index_of(spec), spec.pin.value, spec.python, spec.torch_backend]
    # The keys for x86-64 are older than the other platforms.
    if spec.target != AMD64:
        parts.append(spec.platform)
    return workspace.cache.path("wheels", key_of(*parts))


def fetch_commit_wheel(workspace: Workspace, spec: Spec) -> Path | None:
    """Fetch a commit's wheel from the index; return None if the index lacks it."""
    folder = commit_wheel_folder(workspace, spec)
    wheel = cached_wheel(folder)
    if wheel or workspace.network.offline:
        return wheel
    with workspace.cache.staging() as staging:
        for url in _index_urls(spec):
            command = ["download", "--no-deps", "--quiet", "--dest", staging]
            try:
                _ask_index(workspace, spec, url, command, staging)
            except CommandError:
                continue
            return keep_wheel(staging, folder)
    return None


def _index_urls(spec: Spec) -> list[str]:
    """Return the simple indexes of a commit, the preferred one first."""
    base = f"{index_of(spec)}/{spec.pin.value}"
    # The index has a folder for each variant ("cpu", "cu129") next to the default build.
    if not spec.torch_backend:
        return [base]
    variant = f"{base}/{spec.torch_backend}"
    # The default build is for another CUDA version.
    return [variant] if cuda_of(spec.torch_backend) else [variant, base]


def _ask_index(
    workspace: Workspace, spec: Spec, url: str, command: list[object], staging: Path
) -> str:
    """Run a command of pip for vLLM's wheel in one simple index; return what it printed."""
    cert = workspace.network.pip.cert
    # --isolated: pip's configured index would answer with the newest release for a commit that has
    # no wheel. It also hides pip's certificate, which is therefore passed again.
    options = [
        "--isolated", "--pre", "--python-version", spec.python, "--only-binary", ":all:",
        *pip_options(spec.target, platform_tags(_NEWEST_GLIBC, spec.target)),
        "--retries", "1", *(["--cert", cert] if cert else []), "--index-url", url, "vllm",
    ]  # fmt: skip
    return workspace.network.pip_command(
        [*command, *options],
        f"find the wheel of commit {spec.pin.value}",
        env={"TMPDIR": str(staging)},
    )


def forecast_commit(workspace: Workspace, spec: Spec) -> str:
    """Return how a build would get the wheel of a commit, or why that is unknown; for a dry run.

    Raises:
        VllmEnvError: neither the index nor git has the commit.
    """
    # 1) Ask the index.
    if workspace.network.offline:
        return "unknown: with --offline the wheel index is not asked"
    index = masked(index_of(spec))
    if not workspace.network.answers(index_of(spec)):
        return f"unknown: the wheel index {index} does not answer"
    with workspace.cache.staging() as staging:
        for url in _index_urls(spec):
            # -vv: only then pip prints the status of an answer.
            command: list[object] = ["index", "versions", "-vv"]
            try:
                answer = _ask_index(workspace, spec, url, command, staging)
            except NetworkError as error:
                return f"unknown: the wheel index {index} does not answer. {error.cause}"
            except CommandError as error:
                # A 404 says that the index has no such folder. Any other status says nothing.
                refused = re.search(r"Could not fetch URL \S+: ((?!404)\d{3} [^:]+)", error.tail)
                if refused:
                    return f"unknown: the wheel index {index} answers {refused[1]}"
                continue
            version = re.search(r"^vllm \((\S+)\)", answer, re.MULTILINE)
            name = f"vllm {version[1]}" if version else "a wheel"
            return f"to be fetched: the wheel index {index} has {name}"
        # 2) The index lacks it. Ask git.
        return _forecast_git(workspace, spec, staging)


def _forecast_git(workspace: Workspace, spec: Spec, staging: Path) -> str:
    """Return what ``forecast_commit`` says of a commit that has no wheel: is it in git?

    Raises:
        VllmEnvError: git does not have the commit.
    """
    url = masked(git_url_of(spec))
    index = masked(index_of(spec))
    no_wheel = f"the wheel index {index} has none"
    repository = staging / "asked"
    try:
        # The filter leaves out files and trees. A server that knows no filters sends them.
        _fetch(workspace, git_url_of(spec), spec.pin.value, repository, ["--filter=tree:0"])
    except NetworkError as error:
        return f"unknown: {no_wheel}, and {url} does not answer. {error.cause}"
    except CommandError as error:
        if not re.search(_NO_SUCH_COMMIT, error.tail):
            raise
        raise VllmEnvError(
            f"{spec.pin}: there is no such commit.",
            cause=f"Neither the wheel index {index} nor {url} has it.",
            remedy="Check the SHA. For a commit of a fork, give its repository with --git-url.",
        ) from error
    return f"to be built from {url}: {no_wheel}; to compile vLLM takes hours"


def clone_commit(workspace: Workspace, spec: Spec) -> Path:
    """Return the sources of a commit from the cache, or fetch them."""
    sha = spec.pin.value
    tree = workspace.cache.path("sources", sha)
    if not (tree / ".complete").is_file():
        with workspace.cache.staging() as staging:
            work = staging / "vllm"
            _fetch(workspace, git_url_of(spec), sha, work)
            checkout = ["git", "-C", work, "checkout", "--quiet", "FETCH_HEAD"]
            run(checkout, what=f"check out {sha}", remedy=_FETCH_REMEDY)
            (work / ".complete").touch()
            put_in_place(work, tree)
    return tree


def _fetch(
    workspace: Workspace, url: str, sha: str, work: Path, options: Sequence[str] = ()
) -> None:
    """Fetch a commit into a new repository."""
    run(["git", "init", "--quiet", work], what="make a git repository", remedy="Install git.")
    # git clone takes only branches and tags. A fetch takes a SHA, and without the history.
    fetch = ["-C", work, "fetch", "--quiet", "--depth", "1", *options, url, sha]
    workspace.network.git(fetch, f"fetch commit {sha} from {masked(url)}", remedy=_FETCH_REMEDY)
