# SPDX-License-Identifier: Apache-2.0
"""Interface: an object of ours that the engine uses in place of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import hybrid_plugin
from hybrid_plugin.upstream.hookpoints.module import Module
from hybrid_plugin.upstream.hookpoints.point import (
    Finding,
    NotThereError,
    Status,
    View,
    version_number,
)
from hybrid_plugin.upstream.hookpoints.source import SourceView

_OURS = SourceView(
    Path(hybrid_plugin.__file__).parents[1], "hybrid_plugin", hybrid_plugin.__version__
)


@dataclass(frozen=True, slots=True)
class Interface:
    """What an engine's module asks of an object that we put in its place.

    Found in the source: every `receiver.NAME` in the module, and the keywords of
    every call `receiver.NAME(...)`.  Our class must have all of them.
    """

    user: str
    """The engine's module."""
    receiver: str
    """How it calls the object: the last part, or parts, of the expression."""
    provider: str
    """Our class, `module:Class`."""
    unreached: Mapping[str, str] = field(default_factory=dict)
    """Names that our class may lack, each with the reason why none is ever used."""
    since: str = ""
    """First version of the engine where it is used."""

    @property
    def target(self) -> str:
        """Its name in messages."""
        return f"{self.user}:{self.receiver}"

    def applies_to(self, version: str) -> bool:
        """Whether the adapter relies on it in this version of the engine."""
        return not self.since or version_number(version) >= version_number(self.since)

    def check(self, view: View) -> Finding:
        """Compare what the module uses with what our class has."""
        try:
            uses = self.uses(view)
        except NotThereError as error:
            return Finding(self, Status.MISSING, error.phrase(self.target))
        if not uses:
            problem = f"{self.target} is missing ({self.user} does not use it)"
            return Finding(self, Status.MISSING, problem)
        wrong = [w for name, words in uses.items() for w in self._lacks(name, words)]
        if wrong:
            return Finding(self, Status.CHANGED, "; ".join(wrong))
        return Finding(self, Status.OK)

    def uses(self, view: View) -> dict[str, frozenset[str]]:
        """Each name that is used, with the keywords it is called with.

        Raises:
            NotThereError: if the module is gone.
        """
        found: dict[str, frozenset[str]] = {}
        for name, keywords in _uses(view.module(self.user), self.receiver):
            found[name] = found.get(name, frozenset()) | keywords
        return found

    def _lacks(self, name: str, keywords: frozenset[str]) -> Iterator[str]:
        if name in self.unreached:
            return
        module, _, cls = self.provider.partition(":")
        try:
            ours = _OURS.find(module, (cls, name))
        except NotThereError:
            if not _is_assigned(module, cls, name):
                yield f"{self.target}.{name} is used, which {cls} does not have"
            return
        if ours.parameters is None or ours.takes_any:
            return
        unknown = sorted(keywords - set(ours.parameters))
        if unknown:
            yield f"{self.target}.{name} is given {', '.join(unknown)} as well"


def _is_assigned(module: str, cls: str, name: str) -> bool:
    """Whether a method of our class assigns `self.name`."""
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr == name
        and _dotted(node.value) == "self"
        for definition in _OURS.module(module).tree.body
        if isinstance(definition, ast.ClassDef) and definition.name == cls
        for node in ast.walk(definition)
    )


def _uses(module: Module, receiver: str) -> Iterator[tuple[str, frozenset[str]]]:
    ending = f".{receiver}"
    for node in module.uses():
        used = node.func if isinstance(node, ast.Call) else node
        if not isinstance(used, ast.Attribute) or not isinstance(used.ctx, ast.Load):
            continue
        if f".{_dotted(used.value)}".endswith(ending):
            keywords = node.keywords if isinstance(node, ast.Call) else []
            yield used.attr, frozenset(k.arg for k in keywords if k.arg is not None)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""
