"""Refuses an environment whose files ask for shared libraries that a bare container does not have."""

from collections import defaultdict

from vllm_env.base.errors import VllmEnvError

from .needed_libraries import NeededLibraries
from .outside_libraries import likely_packages

_LISTED = 4  # libraries named in a message


def check_missing_libraries(found: NeededLibraries) -> None:
    """Refuse an environment with missing libraries.

    Raises:
        VllmEnvError: naming the libraries, the files that need them and the packages that have them.
    """
    if not found.missing:
        return
    files: dict[str, list[str]] = defaultdict(list)
    for need in found.missing:
        files[need.library].append(need.file)
    first = sorted(files)[:_LISTED]
    more = f" and {len(files) - _LISTED} more" if len(files) > _LISTED else ""
    debian, conda = zip(*(likely_packages(library) for library in first), strict=True)
    raise VllmEnvError(
        f"The environment lacks shared libraries: {'; '.join(_line(name, files[name]) for name in first)}{more}.",
        cause="They are in no folder that ld.so will look into and in no package, and a bare container does not have them.",
        remedy=f"Install them on this machine, from which they are then packed (probably: apt-get install {' '.join(debian)}; "
        f"on conda-forge: {', '.join(dict.fromkeys(conda))}), or leave out what needs them.",
    )


def _line(library: str, files: list[str]) -> str:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{library}, which {files[0]}{more} needs"
