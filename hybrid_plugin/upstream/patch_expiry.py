# SPDX-License-Identifier: Apache-2.0
"""Patches: what the adapters change in an engine, each until a stated condition.

A patch is a function whose docstring says symptom, cause, fix and when to delete
it.  The package's `patch_expiry.py` states that condition once more, as something
that can be looked up in an engine's source, so that a patch nobody needs is found.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hybrid_plugin.upstream.hookpoints import Contract, Status, View

_PARTS = ("Symptom", "Cause", "Fix", "Delete when")
_PACKAGES = {
    "vllm": ("hybrid_plugin.vllm", "hybrid_models.vllm"),
    "sglang": (
        "hybrid_plugin.sglang",
        "hybrid_plugin.sglang_cpu",
        "hybrid_models.sglang",
    ),
}
"""Our packages that change something in an engine."""


class PatchError(ValueError):
    """A patch without its four sentences, or without a condition."""


@dataclass(frozen=True, slots=True)
class Need:
    """In which versions of an engine a patch is needed."""

    contract: Contract
    where_it_holds: bool = True
    """False: where the contract does not hold."""

    def applies(self, view: View) -> bool:
        """Whether the version that `view` shows needs the patch."""
        if not self.contract.applies_to(view.version):
            return False
        holds = self.contract.check(view).status is Status.OK
        return holds == self.where_it_holds


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch, as its docstring describes it."""

    engine: str
    function: str
    """`module.function`, within `hybrid_plugin` without its name."""
    symptom: str
    cause: str
    fix: str
    delete_when: str
    need: Need


def load(engines: Iterable[str] = ("vllm", "sglang")) -> tuple[Patch, ...]:
    """All patches.

    Raises:
        PatchError: for a patch without condition, or a condition without patch.
    """
    return tuple(
        patch
        for engine in engines
        for package in _PACKAGES[engine]
        for patch in _of_package(engine, package)
    )


def unneeded(
    patches: Iterable[Patch], views: Mapping[str, Iterable[View]]
) -> list[str]:
    """Sentences about patches that no version of their engine needs.

    Args:
        patches: to look at.
        views: the supported versions of each engine.
    """
    return [
        f"{patch.function} is needed by no supported version of {patch.engine}: delete "
        f"it ({patch.delete_when})"
        for patch in patches
        if not any(patch.need.applies(view) for view in views[patch.engine])
    ]


def _of_package(engine: str, package: str) -> Iterator[Patch]:
    conditions = importlib.import_module(f"{package}.patch_expiry")
    file = Path(str(conditions.__file__))
    needs: dict[str, Need] = dict(conditions.NEEDED)
    where = f"{package.replace('.', '/')}/{file.name}"
    for function, text in _described(file.parent):
        if function not in needs:
            raise PatchError(
                f"{where} does not say when {function} is needed; add it there."
            )
        symptom, cause, fix, delete_when = _parts(function, text)
        yield Patch(
            engine=engine,
            function=f"{package.removeprefix('hybrid_plugin.')}.{function}",
            symptom=symptom,
            cause=cause,
            fix=fix,
            delete_when=delete_when,
            need=needs.pop(function),
        )
    if needs:
        raise PatchError(
            f"{where} names {', '.join(needs)}, which no patch is called; take it out."
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
        raise PatchError(f"The docstring of {function} lacks {', '.join(missing)}.")
    return [" ".join(found[part]) for part in _PARTS]
