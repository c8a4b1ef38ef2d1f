"""Read the sources of one vLLM: its names, and the members of its classes."""

from __future__ import annotations

import ast
import functools
import platform
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
_Named = ast.ClassDef | Function
_Assignment = ast.Assign | ast.AnnAssign
_VERSION = re.compile(r"^__version__\b.*?['\"]([^'\"]+)['\"]", re.MULTILINE)


class SourceError(Exception):
    """The sources are not found or cannot be read; the message gives the reason."""


class Sources:
    """Read the modules below a folder with the package ``vllm``.

    Args:
        root: the folder, such as ``site-packages``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def version(self) -> str:
        """Return the version that the package states, or "unknown"."""
        path = self.root / "vllm" / "_version.py"
        found = _VERSION.search(path.read_text(encoding="utf-8")) if path.is_file() else None
        return found[1] if found else "unknown"

    def module(self, name: str) -> ast.Module | None:
        """Return the parsed module; None if there is no module of this name.

        Raises:
            SourceError: this Python cannot parse it.
        """
        base = self.root.joinpath(*name.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                try:
                    return _parsed(path.read_text(encoding="utf-8"))
                except (SyntaxError, ValueError) as error:
                    # A vLLM may use syntax that is newer than this Python.
                    version = platform.python_version()
                    message = f"{path} cannot be read by Python {version}: {error}"
                    raise SourceError(message) from None
        return None

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return the module and the node that define a name; None if there is none.

        If ``module`` only imports the name, the module that it comes from is searched.
        """
        tree = self.module(module)
        for node in _statements(tree.body if tree else []):
            if isinstance(node, _Named) and node.name == name:
                return module, node
            if isinstance(node, _Assignment) and name in targets(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(self._target(module, node), alias.name)
        return None

    def value(self, module: str, name: str) -> ast.expr | None:
        """Return the value that a module assigns to a name; None if it does not."""
        found = self.find(module, name)
        return found[1].value if found and isinstance(found[1], _Assignment) else None

    def _target(self, module: str, node: ast.ImportFrom) -> str:
        """Return the full name of the module that a statement in ``module`` imports from."""
        name = node.module or ""
        if not node.level:
            return name
        package = module.split(".")
        # The first dot means the package itself. For a plain module, that is its parent.
        up = node.level if self.root.joinpath(*package).is_dir() else node.level + 1
        # `from . import x` has no name, which leaves a dot at the end.
        return ".".join([*package[: len(package) - up + 1], name]).rstrip(".")

    def lineage(self, qualified: str) -> list[tuple[str, ast.ClassDef]]:
        """Return a class and its bases in vLLM, each with its module; [] if it is not found.

        Bases come first and the class itself is last, so that its own members replace inherited
        ones in ``members``.

        Args:
            qualified: the module and the class, such as ``vllm.outputs.RequestOutput``.
        """
        module, _, name = qualified.rpartition(".")
        where, node = self.find(module, name) or ("", None)
        if not isinstance(node, ast.ClassDef):
            return []
        found: list[tuple[str, ast.ClassDef]] = []
        for base in node.bases:
            # Parser[T] is the class Parser.
            plain = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(plain, ast.Name):
                found += self.lineage(f"{where}.{plain.id}")
        return [*found, (where, node)]

    def ancestors(self, module: str, name: str) -> set[str]:
        """Return the names of a class and of all its bases, including Python's own."""
        names = {name}
        for _, node in self.lineage(f"{module}.{name}"):
            # The class may have been imported by another name.
            names.add(node.name)
            names.update(map(ast.unparse, node.bases))
        return names

    def members(self, qualified: str) -> dict[str, ast.AST]:
        """Return the members of a class and its bases, with the nodes that define them.

        These are methods, fields, enum members, and attributes that are set in ``__init__``.
        """
        found: dict[str, ast.AST] = {}
        for _, node in self.lineage(qualified):
            for item in node.body:
                if isinstance(item, Function):
                    found[item.name] = item
                    if item.name == "__init__":
                        found |= _set_on_self(item)
                elif isinstance(item, _Assignment):
                    found |= dict.fromkeys(targets(item), item)
        return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those in branches of ``if`` and ``try``."""
    for node in body:
        yield node
        # A name may depend on the platform, on a version, or on an import that may fail.
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def targets(node: _Assignment) -> list[str]:
    """Return the names that an assignment sets."""
    left = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in left if isinstance(target, ast.Name)]


def _set_on_self(function: Function) -> dict[str, ast.AST]:
    """Return the attributes that a method sets, with the nodes of the assignments."""
    return {
        node.attr: node
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


# A class is searched in the same modules again for each of its members and bases.
@functools.lru_cache(maxsize=128)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)
