# SPDX-License-Identifier: Apache-2.0
"""Shims: what the adapters change in an engine, each until a stated condition.

A shim is a function whose docstring says symptom, cause, fix and when to delete
it.  The engine's `shims.py` states that condition once more, as something that can
be looked up in an engine's source, so that a shim nobody needs is found.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import hybrid_plugin
from hybrid_plugin.hookpoints import Contract, Status, View

_PARTS = ("Symptom", "Cause", "Fix", "Delete when")
_PACKAGE = Path(hybrid_plugin.__file__).parent


class ShimError(ValueError):
    """A shim without its four sentences, or without a condition."""


@dataclass(frozen=True, slots=True)
class Need:
    """In which versions of an engine a shim is needed."""

    contract: Contract
    where_it_holds: bool = True
    """False: where the contract does not hold."""

    def applies(self, view: View) -> bool:
        """Whether the version that `view` shows needs the shim."""
        if not self.contract.applies_to(view.version):
            return False
        holds = self.contract.check(view).status is Status.OK
        return holds == self.where_it_holds


@dataclass(frozen=True, slots=True)
class Shim:
    """One shim, as its docstring describes it."""

    engine: str
    function: str
    """`module.function` within `hybrid_plugin`."""
    symptom: str
    cause: str
    fix: str
    delete_when: str
    need: Need


def load(engines: Iterable[str] = ("vllm", "sglang")) -> tuple[Shim, ...]:
    """All shims.

    Raises:
        ShimError: for a shim without condition, or a condition without shim.
    """
    return tuple(shim for engine in engines for shim in _of_engine(engine))


def unneeded(shims: Iterable[Shim], views: Mapping[str, Iterable[View]]) -> list[str]:
    """Sentences about shims that no version of their engine needs.

    Args:
        shims: to look at.
        views: the supported versions of each engine.
    """
    return [
        f"{shim.function} is needed by no supported version of {shim.engine}: delete "
        f"it ({shim.delete_when})"
        for shim in shims
        if not any(shim.need.applies(view) for view in views[shim.engine])
    ]


def _of_engine(engine: str) -> Iterator[Shim]:
    needs: dict[str, Need] = dict(
        importlib.import_module(f"hybrid_plugin.{engine}.shims").NEEDED
    )
    for function, text in _described(_PACKAGE / engine):
        if function not in needs:
            raise ShimError(
                f"hybrid_plugin/{engine}/shims.py does not say when {function} is "
                "needed; add it there."
            )
        symptom, cause, fix, delete_when = _parts(function, text)
        yield Shim(
            engine=engine,
            function=f"{engine}.{function}",
            symptom=symptom,
            cause=cause,
            fix=fix,
            delete_when=delete_when,
            need=needs.pop(function),
        )
    if needs:
        raise ShimError(
            f"hybrid_plugin/{engine}/shims.py names {', '.join(needs)}, which "
            "no shim is called; take it out."
        )


def _described(folder: Path) -> Iterator[tuple[str, str]]:
    """`(module.function, docstring)` of each function that states a symptom."""
    for file in sorted(folder.rglob("*.py")):
        module = ".".join(file.relative_to(folder).with_suffix("").parts)
        yield from _in_body(module, ast.parse(file.read_text()).body)


def _in_body(holder: str, body: Iterable[ast.stmt]) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _in_body(f"{holder}.{node.name}", node.body)
        elif isinstance(node, ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            if any(line.startswith(f"{_PARTS[0]}: ") for line in text.splitlines()):
                yield f"{holder}.{node.name}", text


def _parts(function: str, text: str) -> list[str]:
    """The four sentences, in order, each on one line."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        name, colon, rest = line.partition(": ")
        if colon and name in _PARTS:
            current = found.setdefault(name, [rest.strip()])
        elif line.strip():
            current.append(line.strip())
        elif len(found) == len(_PARTS):
            break
    missing = [part for part in _PARTS if part not in found]
    if missing:
        raise ShimError(f"The docstring of {function} lacks {', '.join(missing)}.")
    return [" ".join(found[part]) for part in _PARTS]
