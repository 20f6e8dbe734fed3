# SPDX-License-Identifier: Apache-2.0
"""HookPoint, and the rules by which one is right or wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hybrid_plugin.upstream.hookpoints.module import Module


class NotThereError(LookupError):
    """A target that an engine does not have; the message adds what is known."""

    def phrase(self, target: str) -> str:
        """What is wrong with `target`."""
        return f"{target} is missing" + (f" ({self})" if self.args else "")


class Status(StrEnum):
    """How a hook point fares in one version of an engine."""

    OK = "ok"
    CHANGED = "changed"
    """It is there, but does not take or do what the adapter relies on."""
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Definition:
    """What a target stands for, seen live or in source."""

    parameters: tuple[str, ...] | None
    """Names of a function's parameters, None for what is not a function."""
    takes_any: bool
    """Whether it takes keyword arguments of any name."""
    inherited: bool
    """Whether it comes from a base of the class that was asked for it."""
    takes_attributes: bool
    """Whether instances of the class take attributes that it does not declare."""
    mentions: Callable[[], frozenset[str]]
    """Names and strings that its code mentions."""
    function: Callable[[], Callable[..., Any]]
    """The function itself; cut out of its module where that is not imported."""


class View(Protocol):
    """One version of an engine, to be looked at."""

    @property
    def version(self) -> str:
        """The engine's version."""

    def find(self, module: str, path: tuple[str, ...]) -> Definition:
        """Find `path` in `module`.

        Raises:
            NotThereError: if the module or a part of the path is gone.
        """

    def module(self, name: str) -> Module:
        """The source of a module, parsed.

        Raises:
            NotThereError: if the module is gone.
        """


class Contract(Protocol):
    """Something that an adapter relies on in an engine."""

    @property
    def target(self) -> str:
        """Its name in messages."""

    def applies_to(self, version: str) -> bool:
        """Whether the adapter relies on it in this version of the engine."""

    def check(self, view: View) -> Finding:
        """Judge it as `view` shows it."""


@dataclass(frozen=True, slots=True)
class HookPoint:
    """One function, class or attribute of an engine that its adapter uses."""

    target: str
    """`module:attribute.path`."""
    parameters: tuple[str, ...] | None = None
    """Parameters it must accept by name, None for what is not a function."""
    closed: bool = False
    """Whether it may take no others, because ours that replaces it does not."""
    mentions: tuple[str, ...] = ()
    """Names or strings its code must mention: what it is relied on to call or read."""
    open: bool = False
    """Whether instances must take attributes of ours."""
    behaves: Callable[[Callable[..., Any]], str | None] | None = None
    """Tries the function out; returns what it does wrong, a phrase, or None.  It must
    run where the rest of its module is absent, so it suits small functions only."""
    own: bool = False
    """Whether its class itself must have it: what a base has would not do."""
    since: str = ""
    """First version of the engine where the adapter uses it."""
    before: str = ""
    """First version of the engine where the adapter uses it no longer."""

    @property
    def module(self) -> str:
        """The module part of the target."""
        return self.target.partition(":")[0]

    @property
    def path(self) -> tuple[str, ...]:
        """The attribute path within the module."""
        return tuple(self.target.partition(":")[2].split("."))

    def applies_to(self, version: str) -> bool:
        """Whether the adapter uses the point with this version of the engine."""
        number = version_number(version)
        return (not self.since or number >= version_number(self.since)) and (
            not self.before or number < version_number(self.before)
        )

    def check(self, view: View) -> Finding:
        """Judge the point as `view` shows it."""
        try:
            found = view.find(self.module, self.path)
        except NotThereError as error:
            return Finding(self, Status.MISSING, error.phrase(self.target))
        if self.own and found.inherited:
            problem = f"{self.target} is missing (only a base of the class has it)"
            return Finding(self, Status.MISSING, problem)
        wrong = "; ".join(self._differences(found))
        if wrong:
            return Finding(self, Status.CHANGED, f"{self.target} {wrong}")
        return Finding(self, Status.OK)

    def _differences(self, found: Definition) -> Iterator[str]:
        if self.parameters is not None:
            yield from self._parameter_differences(found)
        if self.open and not found.takes_attributes:
            yield "takes no attributes but its own"
        if self.mentions:
            absent = sorted(set(self.mentions) - found.mentions())
            if absent:
                yield f"does not mention {', '.join(absent)}"
        if self.behaves is not None:
            wrong = self._try_out(self.behaves, found)
            if wrong is not None:
                yield wrong

    @staticmethod
    def _try_out(
        behaves: Callable[[Callable[..., Any]], str | None], found: Definition
    ) -> str | None:
        try:
            return behaves(found.function())
        except Exception as error:
            return f"failed when it was tried out ({error!r})"

    def _parameter_differences(self, found: Definition) -> Iterator[str]:
        assert self.parameters is not None
        if found.parameters is None:
            yield "is not a function"
            return
        missing = [p for p in self.parameters if p not in found.parameters]
        if missing and not found.takes_any:
            yield f"takes no {', '.join(missing)}"
        extra = [p for p in found.parameters if p not in self.parameters]
        if self.closed and extra:
            yield f"takes {', '.join(extra)} as well"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found out about one hook point."""

    contract: Contract
    status: Status
    problem: str | None = None
    """What is wrong, a phrase that starts with the target; None if nothing is."""


def check(contracts: Iterable[Contract], view: View) -> list[Finding]:
    """Judge all contracts that the adapter relies on in this version of the engine."""
    return [c.check(view) for c in contracts if c.applies_to(view.version)]


def problems(contracts: Iterable[Contract], view: View) -> list[str]:
    """What is wrong, one phrase for each contract that does not hold."""
    return [f.problem for f in check(contracts, view) if f.problem is not None]


def version_number(version: str) -> tuple[int, ...]:
    """The release part of a version, `(0, 33, 0)` for `0.33.0rc1+cpu`.

    Raises:
        ValueError: if the version does not begin with a number.
    """
    release = re.match(r"\d+(\.\d+)*", version)
    if release is None:
        raise ValueError(f"{version!r} is no version: it begins with no number.")
    numbers = [int(part) for part in release.group().split(".")]
    return tuple(numbers + [0] * (3 - len(numbers)))
