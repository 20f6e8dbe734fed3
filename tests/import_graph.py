# SPDX-License-Identifier: Apache-2.0
"""Reads which module of a package imports which, without importing any of them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class When(Enum):
    """When an import statement runs."""

    LOAD = "while the module is loaded"
    CALL = "when a function is called"
    TYPING = "never: for type checkers only"


@dataclass(frozen=True, slots=True)
class Import:
    """One import of one module by another."""

    importer: str
    imported: str
    """Full name: a module of the package scanned as far as it is one, otherwise the
    name as it is written."""
    when: When
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


@dataclass(frozen=True, slots=True)
class Rule:
    """What modules below a package may not import."""

    package: str
    allowed: tuple[str, ...] = ()
    """Packages of the own project that may be imported; all if empty."""
    forbidden: tuple[str, ...] = ()
    """Packages, of whoever, that may not be imported."""

    def breaches(self, imports: Iterable[Import], project: str) -> list[str]:
        """The imports that break the rule, in words."""
        return [
            str(found)
            for found in imports
            if is_below(found.importer, self.package)
            and not is_below(found.imported, self.package)
            and not self._permits(found.imported, project)
        ]

    def _permits(self, name: str, project: str) -> bool:
        if any(is_below(name, package) for package in self.forbidden):
            return False
        if not self.allowed or not is_below(name, project):
            return True
        return any(is_below(name, package) for package in self.allowed)


def is_below(name: str, package: str) -> bool:
    """Whether a module is the package, or lies in it."""
    return name == package or name.startswith(f"{package}.")


def scan(package: Path) -> list[Import]:
    """All imports of all modules of a package, at any depth of functions.

    Args:
        package: folder of the package; its name is the package's.
    """
    modules = {_name(file, package): file for file in package.rglob("*.py")}
    return [
        found
        for name, file in sorted(modules.items())
        for found in _imports_of(name, file, modules)
    ]


def circles(imports: Iterable[Import], when: Sequence[When]) -> list[tuple[str, ...]]:
    """Groups of modules that import each other, directly or by way of others.

    Args:
        imports: of all modules.
        when: which imports count.
    """
    edges: dict[str, set[str]] = defaultdict(set)
    for found in imports:
        if found.when in when:
            edges[found.importer].add(found.imported)
    reached = {module: _reached_from(module, edges) for module in list(edges)}
    groups = {
        tuple(sorted(m for m in others if module in reached.get(m, ())))
        for module, others in reached.items()
        if module in others
    }
    return sorted(groups)


def _reached_from(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    front = [start]
    while front:
        for module in edges.get(front.pop(), ()):
            if module not in reached:
                reached.add(module)
                front.append(module)
    return reached


def _name(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports_of(name: str, file: Path, modules: Mapping[str, Path]) -> Iterator[Import]:
    home = name if file.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(file.read_text(), file.name)
    for statement, when in _statements(tree, When.LOAD):
        for target in _targets(statement, home, modules):
            yield Import(name, target, when, statement.lineno)


def _statements(
    node: ast.AST, when: When
) -> Iterator[tuple[ast.Import | ast.ImportFrom, When]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, when
        elif isinstance(child, ast.If) and _is_for_typing(child.test):
            for statement in child.body:
                yield from _statements(ast.Module([statement], []), When.TYPING)
            for statement in child.orelse:
                yield from _statements(ast.Module([statement], []), when)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _statements(child, When.CALL if when is When.LOAD else when)
        else:
            yield from _statements(child, when)


def _is_for_typing(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _targets(
    statement: ast.Import | ast.ImportFrom, home: str, modules: Mapping[str, Path]
) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    base = statement.module or ""
    if statement.level:
        above = home.split(".")
        above = above[: len(above) - statement.level + 1]
        base = ".".join([*above, *([base] if base else [])])
    names = [f"{base}.{alias.name}" for alias in statement.names]
    return sorted({name if name in modules else base for name in names})
