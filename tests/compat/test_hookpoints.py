# SPDX-License-Identifier: Apache-2.0
"""The rules of hook points, live and in source, on a small engine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_plugin.upstream.hookpoints import (
    HookPoint,
    LiveView,
    SourceView,
    Status,
    View,
)
from hybrid_plugin.upstream.hookpoints.point import version_number

NAME = "small_engine_of_a_test"

FILES = {
    "__init__.py": "__version__ = '1.5.0'\n",
    "base.py": '''
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decimal import Decimal

class Base:
    limit: int
    def step(self, request, *, late=False):
        """Inherited."""
        return self.helper(request, "a label")
    @classmethod
    def build(cls, config): ...
    @staticmethod
    def name(of): ...

@dataclass(slots=True)
class Closed:
    size: int

def table(table, mode):
    if mode == "none":
        return table
    raise NotImplementedError
''',
    "scheduler.py": f"""
from {NAME} import base
from {NAME}.base import Base, table
from .base import *

class Scheduler(Base):
    def schedule(self, request, **extra): ...

Rebound = Scheduler

class Rebuilt:
    def run(self): ...

Rebuilt = type("Rebuilt", (Rebuilt,), {{}})
""",
}


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("engine")
    (root / NAME).mkdir()
    for file, text in FILES.items():
        (root / NAME / file).write_text(text)
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    yield root
    sys.path.remove(str(root))
    for module in [m for m in sys.modules if m.split(".")[0] == NAME]:
        del sys.modules[module]


@pytest.fixture(params=["live", "source"])
def view(request: pytest.FixtureRequest, engine: Path) -> View:
    if request.param == "live":
        return LiveView(NAME)
    return SourceView(engine, NAME, "1.5.0")


def _point(target: str, *args: Any, **kwargs: Any) -> HookPoint:
    return HookPoint(f"{NAME}.{target}", *args, **kwargs)


def _wrong_table(function: Callable[..., Any]) -> str | None:
    return None if function(1, "none") == 2 else "returns the table"


def _fails(function: Callable[..., Any]) -> str | None:
    function(1, "align")
    return None


@pytest.mark.parametrize(
    "point",
    [
        _point("scheduler:Scheduler"),
        _point("scheduler:Base"),
        _point("scheduler:base"),
        _point("scheduler:Closed", own=True),
        _point("base:Base.limit"),
        _point("base:Closed.size"),
        _point("scheduler:table", ("table", "mode"), closed=True),
        _point("scheduler:Scheduler.step", ("request", "late")),
        _point("scheduler:Scheduler.step", ("self", "request", "late"), closed=True),
        _point("scheduler:Scheduler.step", mentions=("helper", "a label")),
        _point("scheduler:Scheduler", mentions=("schedule",)),
        _point("scheduler:Scheduler.schedule", ("anything",), own=True),
        _point("scheduler:Scheduler.build", ("config",), closed=True),
        _point("scheduler:Scheduler.name", ("of",), closed=True),
        _point("scheduler:Rebuilt.run", ("self",)),
        _point("scheduler:Scheduler", open=True),
        _point("base:table", behaves=lambda f: None if f(7, "none") == 7 else "no"),
    ],
    ids=str,
)
def test_holds(point: HookPoint, view: View) -> None:
    assert point.check(view).problem is None
    assert point.check(view).status is Status.OK


@pytest.mark.parametrize(
    ("point", "status", "ending"),
    [
        (_point("scheduler:Gone"), Status.MISSING, "is missing"),
        (_point("scheduler:Scheduler.gone"), Status.MISSING, "is missing"),
        (_point("scheduler:Gone.step"), Status.MISSING, "is missing"),
        (_point("base:Decimal"), Status.MISSING, "is missing"),
        (_point("base:Base.__init__"), Status.MISSING, "is missing"),
        (
            _point("scheduler:Scheduler.step", own=True),
            Status.MISSING,
            "is missing (only a base of the class has it)",
        ),
        (
            _point("scheduler:Scheduler.step", ("self", "late", "soon", "never")),
            Status.CHANGED,
            "takes no soon, never",
        ),
        (
            _point("scheduler:Scheduler.step", ("self", "late"), closed=True),
            Status.CHANGED,
            "takes request as well",
        ),
        (
            _point("scheduler:Scheduler.build", ("cls", "config")),
            Status.CHANGED,
            "takes no cls",
        ),
        (
            _point("scheduler:Scheduler", ("config",)),
            Status.CHANGED,
            "is not a function",
        ),
        (
            _point("scheduler:Scheduler.step", mentions=("helper", "block_pool")),
            Status.CHANGED,
            "does not mention block_pool",
        ),
        (
            _point("base:Closed", open=True),
            Status.CHANGED,
            "takes no attributes but its own",
        ),
        (
            _point("base:table", behaves=_wrong_table),
            Status.CHANGED,
            "returns the table",
        ),
        (
            _point("base:table", behaves=_fails),
            Status.CHANGED,
            "failed when it was tried out (NotImplementedError())",
        ),
    ],
    ids=str,
)
def test_does_not_hold(
    point: HookPoint, status: Status, ending: str, view: View
) -> None:
    finding = point.check(view)
    assert finding.status is status
    assert finding.problem == f"{point.target} {ending}"


def test_missing_module_is_named(view: View) -> None:
    problem = _point("engine:Core").check(view).problem
    assert problem is not None
    assert problem.startswith(f"{NAME}.engine:Core is missing (")
    assert f"{NAME}.engine" in problem.partition("(")[2]


def test_version(view: View) -> None:
    assert view.version == "1.5.0"


@pytest.mark.parametrize(
    ("since", "before", "applies"),
    [
        ("", "", True),
        ("1.5", "", True),
        ("1.5.1", "", False),
        ("", "1.5.0", False),
        ("", "1.10", True),
        ("1.0", "2.0", True),
    ],
)
def test_points_are_for_a_range_of_versions(
    since: str, before: str, applies: bool
) -> None:
    point = HookPoint("a:b", since=since, before=before)
    assert point.applies_to("1.5.0+cpu") is applies


def test_version_numbers() -> None:
    assert version_number("0.33") == (0, 33, 0)
    assert version_number("0.33.1rc2.dev7+g12") == (0, 33, 1)
    with pytest.raises(ValueError, match="'dev' is no version"):
        version_number("dev")
