# SPDX-License-Identifier: Apache-2.0
"""One source file of an engine: what its names stand for."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Imported:
    """A name that comes from another module."""

    module: str
    name: str
    """Its name there; empty for the module itself."""


@dataclass(frozen=True, slots=True)
class Value:
    """A name that is assigned or only annotated."""


Binding = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | Imported | Value


@dataclass(slots=True)
class Module:
    """The names of one module: of two definitions of one name the later one."""

    name: str
    tree: ast.Module
    is_package: bool
    names: dict[str, Binding] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    """Modules that it imports everything from."""
    _members: dict[ast.ClassDef, dict[str, Binding]] = field(default_factory=dict)
    _uses: list[ast.Attribute | ast.Call] = field(default_factory=list)

    def members(self, cls: ast.ClassDef) -> dict[str, Binding]:
        """The names of a class of this module, without its bases'."""
        if cls not in self._members:
            self._members[cls] = dict(self._bindings(cls.body))
        return self._members[cls]

    def uses(self) -> list[ast.Attribute | ast.Call]:
        """Every attribute that is named and every call in the module."""
        if not self._uses:
            kinds = ast.Attribute | ast.Call
            self._uses = [n for n in ast.walk(self.tree) if isinstance(n, kinds)]
        return self._uses

    def read(self) -> None:
        """Fill in the names."""
        for name, binding in self._bindings(self.tree.body):
            # `Name = wrap(Name)` says less about the name than its definition.
            if not (isinstance(binding, Value) and name in self.names):
                self.names[name] = binding

    def _bindings(self, body: Iterable[ast.stmt]) -> Iterator[tuple[str, Binding]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name, node
            elif isinstance(node, ast.ImportFrom):
                yield from self._imported(node)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.asname or alias.name.split(".")[0]
                    yield name, Imported(alias.name, "")
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    yield from _assigned(target)
            elif isinstance(node, ast.AnnAssign):
                yield from _assigned(node.target)
            else:
                yield from self._bindings(_nested(node))

    def _imported(self, node: ast.ImportFrom) -> Iterator[tuple[str, Binding]]:
        module = self._absolute(node)
        for alias in node.names:
            if alias.name == "*":
                self.stars.append(module)
            else:
                yield alias.asname or alias.name, Imported(module, alias.name)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


def _assigned(target: ast.expr) -> Iterator[tuple[str, Binding]]:
    if isinstance(target, ast.Name):
        yield target.id, Value()
    elif isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from _assigned(part)


def _nested(node: ast.stmt) -> Iterator[ast.stmt]:
    """Statements within `node` that run when the module is imported."""
    if isinstance(node, ast.If):
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from node.body
        yield from node.orelse
    elif isinstance(node, ast.Try):
        yield from node.body
        for handler in node.handlers:
            yield from handler.body
        yield from (*node.orelse, *node.finalbody)
    elif isinstance(node, ast.With | ast.For | ast.While):
        yield from node.body


def parse(name: str, file: Path) -> Module:
    """Parse a file, once for as long as it does not change."""
    file = file.resolve()
    status = file.stat()
    return _parse(name, file, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=512)
def _parse(name: str, file: Path, _changed: int, _size: int) -> Module:
    tree = ast.parse(file.read_bytes(), filename=str(file))
    module = Module(name, tree, is_package=file.name == "__init__.py")
    module.read()
    return module
