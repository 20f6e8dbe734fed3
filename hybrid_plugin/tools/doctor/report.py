# SPDX-License-Identifier: Apache-2.0
"""The doctor's report: everything that decides whether serving would work."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hybrid_plugin
from hybrid_plugin.engine.outlook import Outlook, Prospect
from hybrid_plugin.tools.doctor import installed, points
from hybrid_plugin.tools.doctor.installed import Engine
from hybrid_plugin.tools.doctor.points import PointReport
from hybrid_plugin.upstream import matrix
from hybrid_plugin.upstream.contracts import ENGINES, TITLES
from hybrid_plugin.upstream.standing import standing, untested


@dataclass(frozen=True, slots=True)
class Question:
    """What the doctor is asked."""

    engine: str | None = None
    """None: whichever is installed."""
    model: str | None = None
    flags: Sequence[str] = ()
    """Of the server."""
    cache_bytes: int = 16 << 30
    live: bool = True
    """Whether to import the engine."""


@dataclass(slots=True)
class EngineReport:
    """One installed engine."""

    engine: Engine
    standing: str
    """What the compatibility matrix says of it."""
    points: list[PointReport]
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    outlook: Outlook | None = None

    @property
    def title(self) -> str:
        """Name, version and build."""
        return f"{TITLES[self.engine.name]} {self.engine.version}"


@dataclass(slots=True)
class Report:
    """All of it."""

    question: Question
    engines: list[EngineReport]
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether serving would work with every engine that was asked about."""
        return not self.problems and not any(e.problems for e in self.engines)


def environment() -> dict[str, str]:
    """Versions that matter, by name."""
    found = {
        "hybrid-plugin": hybrid_plugin.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    for name in ("torch", "triton"):
        version = installed.version_of(name)
        if version is not None:
            found[name] = version
    return found


def examine(question: Question) -> Report:
    """Look at everything, and say what is wrong."""
    wanted = ENGINES if question.engine is None else (question.engine,)
    engines = [e for name in wanted if (e := installed.find_engine(name)) is not None]
    report = Report(question, [_examine_engine(e, question) for e in engines])
    if not engines:
        names = " or ".join(TITLES[name] for name in wanted)
        report.problems.append(f"{names} is not installed in this environment.")
    return report


def _examine_engine(engine: Engine, question: Question) -> EngineReport:
    installed.ask_for_the_plugin(engine)
    place = (engine.name, engine.version, engine.distribution)
    report = EngineReport(engine, standing(matrix.load(), *place), [])
    try:
        report.points = points.check_engine(engine, live=question.live)
    except Exception as error:  # an engine that cannot be imported raises anything
        report.points = points.check_engine(engine, live=False)
        report.problems.append(f"{report.title} cannot be imported: {error!r}")
    report.problems += [p.problem for p in report.points if p.problem is not None]
    remark = untested(engine.name, engine.version)
    if remark is not None and not report.problems:
        report.warnings.append(f"{report.title} is {remark}.")
    loading = installed.loading_problem(engine.name)
    if loading is not None:
        report.problems.append(loading)
    if question.model is not None and not report.problems:
        _examine_model(report, question)
    return report


def _examine_model(report: EngineReport, question: Question) -> None:
    assert question.model is not None
    module: Any = importlib.import_module(f"hybrid_plugin.{report.engine.name}.outlook")
    outlook: Outlook = module.foresee(
        question.model, question.flags, question.cache_bytes
    )
    report.outlook = outlook
    if outlook.prospect in (Prospect.REFUSED, Prospect.FAILS):
        report.problems.append(outlook.reason)
