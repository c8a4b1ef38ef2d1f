"""Read the sources of one vLLM: which module defines a name, what members a class has, and which functions call a method."""

from __future__ import annotations

import ast
import functools
import re
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
_VERSION = re.compile(r"^__version__\b.*?['\"]([^'\"]+)['\"]", re.MULTILINE)


class SourceError(Exception):
    """The sources are not found or cannot be read; the text gives the reason."""


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
        """Return the parsed module; None if there is no module of this name."""
        base = self.root.joinpath(*name.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                try:
                    return _parsed(path.read_text(encoding="utf-8"))
                except (SyntaxError, ValueError) as error:
                    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
                    raise SourceError(
                        f"{path} cannot be read by Python {version}: {error}"
                    ) from None
        return None

    def modules_with(self, *words: str) -> Iterator[str]:
        """Yield the modules whose text contains all the words, so that only these need to be parsed."""
        for path in sorted(self.root.joinpath("vllm").rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if all(word in text for word in words):
                yield ".".join(path.relative_to(self.root).with_suffix("").parts).removesuffix(
                    ".__init__"
                )

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return the module and the node that define a name; follow re-exports."""
        tree = self.module(module)
        for node in _statements(tree.body if tree else []):
            if (
                isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name == name
            ):
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in targets(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(self._target(module, node), alias.name)
        return None

    def _target(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.split(".")
        if not self.root.joinpath(*package).is_dir():
            package = package[:-1]
        return ".".join(
            [*package[: len(package) - node.level + 1], *([node.module] if node.module else [])]
        )

    def lineage(self, qualified: str) -> list[tuple[str, ast.ClassDef]]:
        """Return a class and its bases that are defined in vLLM, with their modules; the class itself comes last."""
        module, _, name = qualified.rpartition(".")
        found = self.find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return []
        where, node = found[0], found[1]
        made: list[tuple[str, ast.ClassDef]] = []
        for written in node.bases:
            base = written.value if isinstance(written, ast.Subscript) else written
            made += self.lineage(f"{where}.{base.id}") if isinstance(base, ast.Name) else []
        return [*made, (where, node)]

    def ancestors(self, module: str, name: str) -> set[str]:
        """Return the names of a class and of all its bases, including Python's own."""
        found = self.lineage(f"{module}.{name}")
        return (
            {name}
            | {node.name for _, node in found}
            | {ast.unparse(base) for _, node in found for base in node.bases}
        )

    def members(self, qualified: str) -> dict[str, ast.AST]:
        """Return the members of a class and its bases: methods, fields, enum members and attributes set in __init__."""
        made: dict[str, ast.AST] = {}
        for _, node in self.lineage(qualified):
            for item in node.body:
                if isinstance(item, Function):
                    made[item.name] = item
                    if item.name == "__init__":
                        made |= _set_on_self(item)
                elif isinstance(item, ast.Assign | ast.AnnAssign):
                    made |= dict.fromkeys(targets(item), item)
        return made


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """Return the names that an assignment sets."""
    left = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in left if isinstance(target, ast.Name)]


def _set_on_self(function: Function) -> dict[str, ast.AST]:
    return {
        node.attr: node
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


@functools.lru_cache(maxsize=128)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


class CallSite(NamedTuple):
    """A call of a method: the enclosing function, the object and the arguments, as written."""

    where: str
    owner: str
    arguments: str


def calls_of(tree: ast.Module, *methods: str) -> Iterator[CallSite]:
    """Yield the calls of methods. A method that is passed on without a call has the arguments ``by reference``."""

    def walk(node: ast.AST, path: tuple[str, ...]) -> Iterator[CallSite]:
        called = node.func if isinstance(node, ast.Call) else None
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.Attribute) and child.attr in methods:
                given = (
                    (*node.args, *node.keywords)
                    if isinstance(node, ast.Call) and child is called
                    else None
                )
                arguments = "by reference" if given is None else ", ".join(map(ast.unparse, given))
                yield CallSite(".".join(path), ast.unparse(child.value), arguments)
            yield from walk(child, (*path, child.name) if named else path)  # type: ignore[attr-defined]

    return walk(tree, ())
