"""What is new, gone and changed between two records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from api_contract.describe import Record


@dataclass(frozen=True)
class Difference:
    """Lines that name what is new, gone and changed; a changed one gives both texts."""

    new: tuple[str, ...]
    gone: tuple[str, ...]
    changed: tuple[str, ...]


def compare(before: Record, after: Record) -> Difference:
    """Return the difference of two records; their versions are left out."""
    old, fresh = _flat(before), _flat(after)
    return Difference(
        new=tuple(_line(name, fresh[name]) for name in sorted(fresh.keys() - old.keys())),
        gone=tuple(_line(name, old[name]) for name in sorted(old.keys() - fresh.keys())),
        changed=tuple(
            f"{name}: {old[name]}  ->  {fresh[name]}" for name in sorted(old.keys() & fresh.keys()) if old[name] != fresh[name]
        ),
    )


def _line(name: str, text: str) -> str:
    return f"{name}: {text}" if text else name


def _flat(record: Record) -> dict[str, str]:
    """Return one entry for each name of each section; an element of a list is a name of its own."""
    found: dict[str, str] = {}
    for section, content in record.items():
        if section == "version":
            continue
        entries: Mapping[str, Any] = content if isinstance(content, dict) else {str(item): "" for item in content}
        for name, text in entries.items():
            if isinstance(text, list):
                found |= {f"{section}: {name}: {item}": "" for item in text}
            else:
                found[f"{section}: {name}"] = str(text)
    return found
