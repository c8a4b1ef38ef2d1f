"""The places that pip and uv take packages from, each to be asked alone."""

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """An index or a folder with wheels.

    Attributes:
        place: its URL or path; "" for the index that pip asks if none is configured.
        is_index: whether it has a page for each package, unlike a find-links folder.
    """

    place: str
    is_index: bool = True

    @property
    def name(self) -> str:
        """Return the place as the user configured it, without a password."""
        return masked(self.place) or "pip's default index"


def pip_settings(sources: list[Source], empty: Path) -> dict[str, str]:
    """Return the variables by which pip asks these sources only.

    The rest of its configuration stays: certificates, proxies, time limits.

    Args:
        sources: the sources.
        empty: an empty folder. An empty variable would leave pip's files in force.
    """
    indexes = [source.place for source in sources if source.is_index]
    folders = [source.place for source in sources if not source.is_index]
    # Without this variable, pip asks its default index, which is the source "".
    first = {"PIP_INDEX_URL": indexes[0]} if indexes and indexes[0] else {}
    return {
        **first,
        "PIP_EXTRA_INDEX_URL": " ".join(indexes[1:]) or empty.as_uri(),
        "PIP_FIND_LINKS": " ".join(folders) or str(empty),
        "PIP_NO_INDEX": "0" if indexes else "1",
        # The lock decides about versions.
        "PIP_CONSTRAINT": os.devnull,
    }


def masked(text: str) -> str:
    """Return a text without the names and passwords of its URLs."""
    # pip takes all before the last @: a password may have one.
    return re.sub(r"://[^/\s]+@", "://****@", text)


def has_password(text: str) -> bool:
    """Return whether a URL in a text has a password; a name alone is no secret."""
    return re.search(r"://[^/\s]*:[^/\s]*@", text) is not None


def uv_places(*names: str) -> list[str]:
    """Return the places in variables of uv, which may have the form ``name=url``."""
    places = [place for name in names for place in re.split(r"[\s,]+", os.environ.get(name, ""))]
    return [re.sub(r"^[\w.-]+=(?=\w+:)", "", place) for place in places if place]
