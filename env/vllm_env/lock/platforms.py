"""Wheels for a kind of machine: their tags, and how pip is asked for those of another kind."""

from collections.abc import Iterable

from packaging.utils import parse_wheel_filename

from vllm_env.base.machine import Platform, this_platform

# manylinux_2_5 is manylinux1, the oldest platform that wheels name.
_OLDEST_GLIBC = 5


def platform_tags(glibc: int, target: Platform) -> list[str]:
    """Return the platform tags of wheels for a machine with glibc 2.``glibc``, best ones first."""
    machine = target.machine
    # Newest first, as pip prefers them.
    minors = range(glibc, _OLDEST_GLIBC - 1, -1)
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in minors]
    # Then the names from before PEP 600, and last a wheel that may fit one machine only.
    platforms += [f"{name}_{machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1")]
    return [*platforms, f"linux_{machine}"]


def tags_of(files: Iterable[str]) -> list[str]:
    """Return the platform tags in the names of wheels."""
    tags = {tag.platform for file in files for tag in parse_wheel_filename(file)[3]}
    return sorted(tags - {"any"})


def pip_options(target: Platform, tags: Iterable[str]) -> list[str]:
    """Return pip's options for wheels with these platform tags; none for this kind of machine."""
    if target == this_platform():
        return []
    return [option for tag in tags for option in ("--platform", tag)]
