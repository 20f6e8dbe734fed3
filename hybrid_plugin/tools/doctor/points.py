# SPDX-License-Identifier: Apache-2.0
"""The engine's hook points: in its source, and once more with it imported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid_plugin.tools.doctor.installed import Engine
from hybrid_plugin.upstream.contracts import contracts_of
from hybrid_plugin.upstream.hookpoints import (
    Contract,
    Finding,
    HookPoint,
    LiveView,
    SourceView,
    Status,
    check,
)

OK = "ok"
MOVED = "moved"


@dataclass(frozen=True, slots=True)
class PointReport:
    """One hook point, as the report shows it."""

    target: str
    status: str
    """`ok`, `moved`, `changed` or `missing`."""
    problem: str | None = None


def check_engine(engine: Engine, *, live: bool) -> list[PointReport]:
    """Check every hook point of an installed engine.

    Args:
        engine: to check.
        live: whether to import it, which takes its time and shows what other
            plugins changed.
    """
    contracts = contracts_of(engine.name)
    view = SourceView(engine.root, engine.name, engine.version)
    findings = check(contracts, view)
    if live:
        alive = _live(engine, [f.contract for f in findings if f.problem is None])
        findings = [alive.get(f.contract.target, f) for f in findings]
    return [_report(finding, engine) for finding in findings]


def _live(engine: Engine, contracts: Iterable[Contract]) -> dict[str, Finding]:
    """What does not hold in the imported engine."""
    found = check(_of_this_platform(engine, contracts), LiveView(engine.name))
    return {f.contract.target: f for f in found if f.problem is not None}


def _of_this_platform(
    engine: Engine, contracts: Iterable[Contract]
) -> Sequence[Contract]:
    """Those that can be imported here: some need a CPU build."""
    if engine.name != "vllm":
        return tuple(contracts)
    from vllm.platforms import current_platform

    from hybrid_plugin.vllm.contracts import CPU_HOOKS

    if current_platform.is_cpu():
        return tuple(contracts)
    elsewhere = {hook.target for hook in CPU_HOOKS}
    return tuple(c for c in contracts if c.target not in elsewhere)


def _report(finding: Finding, engine: Engine) -> PointReport:
    target, problem = finding.contract.target, finding.problem
    if problem is None:
        return PointReport(target, OK)
    if finding.status is Status.MISSING and isinstance(finding.contract, HookPoint):
        now = whereabouts(finding.contract, engine.root)
        if now:
            return PointReport(target, MOVED, f"{problem}; now in {', '.join(now)}")
    return PointReport(target, finding.status.value, problem)


def whereabouts(point: HookPoint, root: Path, most: int = 3) -> list[str]:
    """Other modules of the engine that define something of the point's name."""
    name = point.path[-1]
    if name.startswith("__"):
        return []
    indent = "" if len(point.path) == 1 else r"[ \t]+"
    pattern = re.compile(rf"^{indent}(?:async def|def|class) +{name}\b", re.MULTILINE)
    package = root / point.module.partition(".")[0]
    found = []
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        if module != point.module and pattern.search(file.read_text(errors="ignore")):
            found.append(module)
    return found[:most]
