"""Read from vLLM's application what the bodies of its paths may have."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True)
class BodyType:
    """What vLLM's application takes on a path.

    Attributes:
        classes: vLLM's pydantic classes. A body is one of them.
        fields: the names of their fields, and the aliases.
    """

    classes: tuple[Any, ...]
    fields: frozenset[str]

    def errors(self, body: Mapping[str, Any]) -> int:
        """Return the number of errors that pydantic finds in a body; 0 if vLLM takes it.

        vLLM's answer makes an object of each error. Counting them costs a twentieth of that.
        """
        return min(_errors(one, body) for one in self.classes)


def body_types(app: Any) -> dict[str, BodyType]:
    """Return the type of each path's body. Paths without a body that has a class are left out."""
    found = {}
    for path, route in _routes(app.routes):
        field = getattr(route, "body_field", None)
        hint = getattr(getattr(field, "field_info", None), "annotation", None)
        classes = tuple(_classes(hint))
        if classes:
            names = frozenset(name for one in classes for name in _names(one))
            found[path] = BodyType(classes, names)
    return found


def _errors(model: Any, body: Mapping[str, Any]) -> int:
    """Return how many errors a pydantic class finds in a body; 1 if it fails otherwise."""
    try:
        # In a copy: some of vLLM's checks replace values of the object that they get.
        model.model_validate({**body})
    except ValueError as error:
        count = getattr(error, "error_count", None)
        return int(count()) if count else 1
    # A fault in one of vLLM's checks. vLLM answers it, too.
    except Exception:  # noqa: BLE001
        return 1
    return 0


def _routes(routes: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the route of each route, also of those below a mounted path."""
    for route in routes:
        path = above + getattr(route, "path", "")
        yield path, route
        yield from _routes(getattr(route, "routes", None) or (), path)


def _classes(hint: Any) -> Iterator[Any]:
    """Yield the pydantic classes of a type, which may be a union of them."""
    if hasattr(hint, "model_fields"):
        yield hint
    for inner in typing.get_args(hint):
        yield from _classes(inner)


def _names(model: Any) -> Iterator[str]:
    """Yield the names of a pydantic class's fields, and the aliases under which a body has them."""
    for name, field in model.model_fields.items():
        yield name
        aliases = (field.alias, field.validation_alias)
        for alias in aliases:
            # An alias may be a choice of several. Each is a name, or a path that begins with one
            # and may continue with indexes. No alias is None.
            for choice in getattr(alias, "choices", (alias,)):
                first = getattr(choice, "path", (choice,))[0]
                if isinstance(first, str):
                    yield first
