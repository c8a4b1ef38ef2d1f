"""Hands pip's configuration to uv, which does not read it: indexes, find-links folders, certificates, trusted hosts."""

import ast
import os
import sys
from dataclasses import dataclass

from .process import capture

_NAMES = ("index-url", "extra-index-url", "find-links", "cert", "trusted-host", "no-index")


@dataclass(frozen=True)
class PipConfig:
    """What pip is configured with on this machine; every field may be empty."""

    index_url: str = ""
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    cert: str = ""
    no_index: bool = False

    def uv_arguments(self) -> list[str]:
        """Return the same configuration as options of ``uv pip``."""
        arguments = ["--no-index"] if self.no_index else []
        if self.index_url:
            arguments += ["--default-index", self.index_url]
        for url in self.extra_index_urls:
            arguments += ["--index", url]
        for place in self.find_links:
            arguments += ["--find-links", place]
        for host in self.trusted_hosts:
            arguments += ["--allow-insecure-host", host]
        # pip takes the best version of all indexes; uv would stop at the first index that has the name
        return [*arguments, "--index-strategy", "unsafe-best-match"]

    def uv_environment(self) -> dict[str, str]:
        """Return the variables that uv needs in addition."""
        return {"SSL_CERT_FILE": self.cert} if self.cert and not os.environ.get("SSL_CERT_FILE") else {}


def read_pip_config(python: str = sys.executable) -> PipConfig:
    """Read what ``pip config list`` prints: files and ``PIP_*`` variables, the variables winning."""
    status, listing = capture([python, "-I", "-m", "pip", "config", "list"])  # -I: nothing of the current folder
    return parse_pip_config(listing if status == 0 else "")


def parse_pip_config(listing: str) -> PipConfig:
    """Parse lines like ``global.index-url='…'``; sections for other pip commands are ignored."""
    values: dict[str, str] = {}
    for rank in ("global", "install", ":env:"):  # the later ones win, as in pip
        for line in listing.splitlines():
            key, _, literal = line.partition("=")
            section, _, name = key.rpartition(".")
            if section == rank and name in _NAMES:
                values[name] = str(ast.literal_eval(literal))
    return PipConfig(
        index_url=values.get("index-url", ""),
        extra_index_urls=tuple(values.get("extra-index-url", "").split()),
        find_links=tuple(values.get("find-links", "").split()),
        trusted_hosts=tuple(values.get("trusted-host", "").split()),
        cert=values.get("cert", ""),
        no_index=values.get("no-index", "").lower() in ("1", "true", "yes", "on"),
    )
