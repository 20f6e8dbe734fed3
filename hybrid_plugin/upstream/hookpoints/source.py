# SPDX-License-Identifier: Apache-2.0
"""The engine as it is in a folder of source files: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from hybrid_plugin.upstream.hookpoints.isolate import cut_out
from hybrid_plugin.upstream.hookpoints.module import Binding, Imported, Module, parse
from hybrid_plugin.upstream.hookpoints.point import Definition, NotThereError

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class SourceView:
    """An unpacked wheel, or the folder that an engine is installed in.

    It follows names that a module imports from others of the same package, and
    attributes that a class has from its bases there.  Imports that only type
    checkers see do not count.
    """

    def __init__(self, root: Path, package: str, version: str) -> None:
        """Look at `root/package`, which is of this version."""
        self._root = root
        self._package = package
        self._version = version
        self._modules: dict[str, Module] = {}

    @property
    def version(self) -> str:
        """The version that was given."""
        return self._version

    def find(self, module: str, path: tuple[str, ...]) -> Definition:
        """Find `path` in `module`.

        Raises:
            NotThereError: if there is no such file, or nothing of that name in it.
        """
        _, binding = self.locate(module, path)
        inherited = False
        if len(path) > 1:
            home, cls = self.locate(module, path[:-1])
            assert isinstance(cls, ast.ClassDef)
            inherited = path[-1] not in home.members(cls)
        return _definition(binding, in_class=len(path) > 1, inherited=inherited)

    def locate(self, module: str, path: tuple[str, ...]) -> tuple[Module, Binding]:
        """The module that defines `path` of `module`, and the definition there.

        Raises:
            NotThereError: as `find` does.
        """
        home, binding = self._global(module, path[0], frozenset())
        for depth, name in enumerate(path[1:], 1):
            if not isinstance(binding, ast.ClassDef):
                raise NotThereError(f"{module}:{'.'.join(path[:depth])} is no class")
            member = self._member(home, binding, name, frozenset())
            if member is None:
                raise NotThereError
            home, binding = member
        return home, binding

    def module(self, name: str) -> Module:
        """The parsed module, as it was when this view first looked at it.

        Raises:
            NotThereError: if there is no such file.
        """
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> Module:
        base = self._root.joinpath(*name.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return parse(name, file)
        raise NotThereError(f"there is no module {name}")

    def _global(
        self, module: str, name: str, seen: frozenset[tuple[str, str]]
    ) -> tuple[Module, Binding]:
        """The module that defines a global, and the definition."""
        home = self.module(module)
        binding = home.names.get(name)
        if binding is None:
            for other in home.stars:
                if other.startswith(self._package) and (other, name) not in seen:
                    try:
                        return self._global(other, name, seen | {(module, name)})
                    except NotThereError:
                        continue
            raise NotThereError
        if isinstance(binding, Imported) and self._is_ours(binding):
            step = (binding.module, binding.name)
            if step not in seen:
                return self._follow(home, binding, seen | {step})
        return home, binding

    def _follow(
        self, home: Module, binding: Imported, seen: frozenset[tuple[str, str]]
    ) -> tuple[Module, Binding]:
        try:
            return self._global(binding.module, binding.name, seen)
        except NotThereError:
            if not binding.name or self._is_submodule(binding):
                return home, binding
            if "__getattr__" in self.module(binding.module).names:
                return home, binding
            raise

    def _is_submodule(self, binding: Imported) -> bool:
        try:
            self.module(f"{binding.module}.{binding.name}")
        except NotThereError:
            return False
        return True

    def _is_ours(self, binding: Imported) -> bool:
        return binding.module.split(".")[0] == self._package

    def _member(
        self, home: Module, cls: ast.ClassDef, name: str, seen: frozenset[str]
    ) -> tuple[Module, Binding] | None:
        found = home.members(cls).get(name)
        if found is not None:
            return home, found
        for base in cls.bases:
            base_name = _last_name(base)
            if base_name is None or base_name in seen:
                continue
            try:
                base_home, binding = self._global(home.name, base_name, frozenset())
            except NotThereError:
                continue
            if isinstance(binding, ast.ClassDef):
                inherited = self._member(base_home, binding, name, seen | {base_name})
                if inherited is not None:
                    return inherited
        return None


def _last_name(base: ast.expr) -> str | None:
    if isinstance(base, ast.Subscript):
        base = base.value
    return base.id if isinstance(base, ast.Name) else None


def _definition(binding: Binding, *, in_class: bool, inherited: bool) -> Definition:
    names: list[str] | None = None
    takes_any = False
    if isinstance(binding, _Function):
        arguments = binding.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        if in_class and _is_classmethod(binding):
            names = names[1:]
        names += [a.arg for a in arguments.kwonlyargs]
        takes_any = arguments.kwarg is not None
    return Definition(
        parameters=None if names is None else tuple(names),
        takes_any=takes_any,
        inherited=inherited,
        takes_attributes=isinstance(binding, ast.ClassDef) and not _has_slots(binding),
        mentions=lambda: _mentioned(binding),
        function=lambda: cut_out(binding),
    )


def _has_slots(cls: ast.ClassDef) -> bool:
    by_name = any(
        isinstance(node, ast.Assign) and "__slots__" in ast.unparse(node.targets[0])
        for node in cls.body
    )
    return by_name or any("slots=True" in ast.unparse(d) for d in cls.decorator_list)


def _is_classmethod(function: _Function) -> bool:
    return any(
        isinstance(d, ast.Name) and d.id == "classmethod"
        for d in function.decorator_list
    )


@lru_cache(maxsize=4096)
def _mentioned(binding: Binding) -> frozenset[str]:
    if not isinstance(binding, ast.AST):
        return frozenset()
    return frozenset(_names_in(binding))


def _names_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, _Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
