"""What ``export`` refuses before it reads or writes anything."""

import re
from pathlib import Path

from vllm_env.base.errors import UsageError
from vllm_env.model.manifest import Manifest


def check_arguments(models: list[tuple[Path, Manifest]], folder: Path, tag: str) -> None:
    """Check the arguments of ``export``, and whether the models fit into one image.

    Raises:
        UsageError: they do not, or an argument is wrong.
    """
    # The distribution specification has this form.
    if not re.fullmatch(r"\w[\w.-]{0,127}", tag, re.ASCII):
        raise UsageError(
            f"--tag {tag!r} is not a tag.",
            remedy="Use up to 128 letters, digits, underscores, points and dashes, such as 0.32.0.",
        )
    if ":" in str(folder):
        raise UsageError(
            f"{folder} has a colon, after which skopeo and oras expect a tag.",
            remedy="Name another folder.",
        )
    names = [model.name for model, _ in models]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"Two models have the name {name}.", remedy="Name each --model once.")
    releases = sorted({manifest.triton_release for _, manifest in models})
    if len(releases) > 1:
        raise UsageError(
            f"The models are built for Triton {' and '.join(releases)}, and one server loads all.",
            remedy="Export each on its own, or build them for one release.",
        )
    platforms = sorted({manifest.platform for _, manifest in models})
    if len(platforms) > 1:
        raise UsageError(
            f"The models are built for {' and '.join(platforms)}, and an image is for one of them.",
            remedy="Export each on its own.",
        )
