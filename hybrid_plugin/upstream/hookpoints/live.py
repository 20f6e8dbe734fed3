# SPDX-License-Identifier: Apache-2.0
"""The engine as it is in this process: modules are imported."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from hybrid_plugin.upstream.hookpoints.module import Module, parse
from hybrid_plugin.upstream.hookpoints.point import Definition, NotThereError


def resolve(target: str) -> tuple[Any, str]:
    """Return the object that holds `module:attribute.path`, and the last name.

    Raises:
        ImportError: if the module is gone.
        AttributeError: if a holder on the path is gone.
    """
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *holders, name = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    return owner, name


class LiveView:
    """The installed engine, imported."""

    def __init__(self, package: str) -> None:
        """Look at the engine whose top-level package this is."""
        self._package = package

    @property
    def version(self) -> str:
        """What the engine says its version is."""
        return str(importlib.import_module(self._package).__version__)

    def find(self, module: str, path: tuple[str, ...]) -> Definition:
        """Find `path` in `module`, which is imported for it.

        Raises:
            NotThereError: if the module cannot be imported or the path is gone.
        """
        *holders, name = path
        try:
            owner: Any = importlib.import_module(module)
            for holder in holders:
                owner = getattr(owner, holder)
        except ImportError as error:
            raise NotThereError(f"{module} cannot be imported: {error}") from error
        except AttributeError as error:
            raise NotThereError from error
        if not hasattr(owner, name) or _is_objects(owner, name):
            if _is_field(owner, name):
                return _definition(None, inherited=False)
            raise NotThereError
        inherited = isinstance(owner, type) and name not in vars(owner)
        return _definition(getattr(owner, name), inherited=inherited)

    def module(self, name: str) -> Module:
        """The source of a module, which is imported for it.

        Raises:
            NotThereError: if it cannot be imported, or comes without source.
        """
        try:
            file = importlib.import_module(name).__file__
        except ImportError as error:
            raise NotThereError(f"{name} cannot be imported: {error}") from error
        if file is None or not file.endswith(".py"):
            raise NotThereError(f"{name} comes without source")
        return parse(name, Path(file))


def _is_objects(owner: Any, name: str) -> bool:
    """Whether it is what every class has, `__init__` without a definition."""
    if not isinstance(owner, type):
        return False
    return next((c for c in owner.__mro__ if name in vars(c)), None) is object


def _is_field(owner: Any, name: str) -> bool:
    """Whether instances have it: a field without a default is no class attribute."""
    if not isinstance(owner, type):
        return False
    return any(name in inspect.get_annotations(cls) for cls in owner.__mro__)


def _definition(found: Any, *, inherited: bool) -> Definition:
    names: tuple[str, ...] | None = None
    takes_any = False
    if callable(found) and not isinstance(found, type):
        parameters = inspect.signature(found).parameters.values()
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        names = tuple(p.name for p in parameters if p.kind not in variadic)
    return Definition(
        parameters=names,
        takes_any=takes_any,
        inherited=inherited,
        takes_attributes=isinstance(found, type) and bool(found.__dictoffset__),
        mentions=lambda: frozenset(_mentioned(found)),
        function=lambda: _function(found),
    )


def _function(found: Any) -> Callable[..., Any]:
    if not callable(found):
        raise TypeError("it is not a function")
    function: Callable[..., Any] = inspect.unwrap(found)
    return function


def _mentioned(found: Any) -> Iterator[str]:
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, type):
        for name, member in vars(found).items():
            yield name
            yield from _mentioned(getattr(member, "__func__", member))
        return
    code = getattr(inspect.unwrap(found), "__code__", None)
    if isinstance(code, CodeType):
        yield from _in_code(code)


def _in_code(code: CodeType) -> Iterator[str]:
    yield code.co_name
    yield from code.co_names
    yield from code.co_varnames
    yield from code.co_cellvars
    yield from code.co_freevars
    for constant in code.co_consts:
        yield from _in_constant(constant)


def _in_constant(constant: object) -> Iterator[str]:
    if isinstance(constant, CodeType):
        yield from _in_code(constant)
    elif isinstance(constant, str):
        yield constant
    elif isinstance(constant, tuple | frozenset):
        for part in constant:
            yield from _in_constant(part)
