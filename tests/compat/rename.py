# SPDX-License-Identifier: Apache-2.0
"""A copy of an engine's source in which one thing that we rely on has another name."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from hybrid_plugin.upstream.hookpoints import Contract, HookPoint, Interface, SourceView
from hybrid_plugin.upstream.hookpoints.module import Module

ENDING = "_elsewhere"

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def renamed_copy(view: SourceView, root: Path, contract: Contract, to: Path) -> Path:
    """Lay `root` out in `to` by links, with the contract's target renamed."""
    home, text = renamed_source(view, root, contract)
    file = _file_of(home)
    _link_all_but(file, root, to)
    (to / file).write_text(text)
    return to


def renamed_source(
    view: SourceView, root: Path, contract: Contract
) -> tuple[Module, str]:
    """The module that has the contract's target, and its text after the renaming."""
    if isinstance(contract, Interface):
        home = view.module(contract.user)
        uses = contract.uses(view)
        name = next(n for n in uses if n not in contract.unreached)
        return home, renamed_use((root / _file_of(home)).read_text(), contract, name)
    assert isinstance(contract, HookPoint)
    *holders, name = contract.path
    home = view.module(contract.module)
    bodies = [home.tree.body]
    if holders:
        home, _ = view.locate(contract.module, contract.path)
        bodies = _bodies_of_class(home, holders[-1], name)
    places = [place for body in bodies for place in _places(body, name)]
    assert places, f"{contract.target} is bound nowhere in {home.name}"
    return home, _renamed((root / _file_of(home)).read_text(), name, places)


def renamed_use(text: str, contract: Interface, name: str) -> str:
    """The text with one use of our object renamed."""
    pattern = rf"\b{re.escape(contract.receiver)}\.{name}\b"
    return re.sub(pattern, f"{contract.receiver}.{name}{ENDING}", text)


def _file_of(home: Module) -> Path:
    parts = home.name.split(".")
    return Path(*parts, "__init__.py" if home.is_package else "").with_suffix(".py")


def _bodies_of_class(home: Module, holder: str, name: str) -> list[list[ast.stmt]]:
    """The bodies of the class that defines the name and of its bases in the module.

    The class is the holder, or a base of it.  The bases' bodies go with it because what
    a class does not define it inherits.
    """
    classes = [n for n in ast.walk(home.tree) if isinstance(n, ast.ClassDef)]
    defining = [c for c in classes if any(_places(c.body, name))]
    lineage = [next((c for c in defining if c.name == holder), defining[0])]
    for one in lineage:
        bases = {base.id for base in one.bases if isinstance(base, ast.Name)}
        lineage += [c for c in classes if c.name in bases and c not in lineage]
    return [one.body for one in lineage]


def _places(
    body: Iterable[ast.stmt], name: str
) -> Iterator[ast.alias | ast.Name | _Definition]:
    """Nodes at the level of `body` that bind the name."""
    for node in body:
        if isinstance(node, _Definition):
            if node.name == name:
                yield node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (a for a in node.names if (a.asname or a.name) == name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and target.id == name:
                    yield target
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _places(node.body, name)
            yield from _places(getattr(node, "orelse", []), name)


def _renamed(
    text: str, name: str, places: Iterable[ast.alias | ast.Name | _Definition]
) -> str:
    lines = text.splitlines(keepends=True)
    for place in places:
        line = lines[place.lineno - 1]
        head, tail = line[: place.col_offset], line[place.col_offset :]
        new = f"{name}{ENDING}"
        if isinstance(place, ast.alias) and place.asname is None:
            new = f"{name} as {new}"
        elif isinstance(place, ast.alias):
            head, _, tail = line.rpartition(name)
            tail = name + tail
        lines[place.lineno - 1] = head + re.sub(rf"\b{name}\b", new, tail, count=1)
    return "".join(lines)


def _link_all_but(file: Path, root: Path, to: Path) -> None:
    here = Path()
    for part in file.parts:
        (to / here).mkdir(exist_ok=True)
        for entry in os.scandir(root / here):
            if entry.name != part:
                os.symlink(entry.path, to / here / entry.name)
        here /= part
