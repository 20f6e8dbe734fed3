# SPDX-License-Identifier: Apache-2.0
"""docs/compatibility.md, from the matrix and what the checks found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_plugin.upstream.contracts import TITLES
from hybrid_plugin.upstream.hookpoints import Finding
from hybrid_plugin.upstream.matrix import Row, Status
from hybrid_plugin.upstream.patch_expiry import Patch

_HEAD = """\
# Compatibility

`ci/run_matrix.py --all --contracts-only --write` makes this page out of
`ci/matrix.toml` and the published wheels; a test fails when it is out of date.

| engine | platform | Python | PyTorch | status | hook points | engine tests |
|---|---|---|---|---|---|---|
"""

_WORDS = """
* **served**: the repository's engine tests pass there, in CI or on a GPU machine.
* **contracts**: every hook point holds in the published wheel; no engine was run.
* **refused**: hook points are missing.  The plugin names them when a hybrid model
  is to be served; other models are left alone.

A hook point is a function, class, field or behaviour of the engine that the adapter
relies on.  All of them are checked in the source of the wheel on every change, and
again by the plugin before it serves, by the same rules: a release that is newer than
this table is served with a warning if all of them hold, and refused by name if one
does not.  `hybrid-plugin doctor` shows them for the engine that is installed.
"""


@dataclass(frozen=True, slots=True)
class Checked:
    """A row and what its source shows."""

    row: Row
    findings: Sequence[Finding]

    @property
    def problems(self) -> list[str]:
        """What does not hold, one phrase each."""
        return [f.problem for f in self.findings if f.problem is not None]


def table_row(checked: Checked) -> tuple[str, ...]:
    """One line of the table, a cell each."""
    row = checked.row
    missing = len(checked.problems)
    build = "" if row.distribution == row.engine else f" (`{row.distribution}`)"
    return (
        f"{TITLES[row.engine]} {row.version}{build}",
        row.platform,
        row.python,
        row.torch,
        row.status.value,
        f"{missing} do not hold" if missing else "all hold",
        {"ci": "in CI", "gpu": "on a GPU machine"}.get(row.tested, "none"),
    )


def page(checked: Sequence[Checked], patches: Sequence[Patch]) -> str:
    """The whole page."""
    lines = [_HEAD.rstrip()]
    lines += [f"| {' | '.join(table_row(c))} |" for c in checked]
    lines.append(_WORDS)
    lines += ["## Notes", ""]
    lines += [_note(c.row) for c in checked if c.row.note]
    for refused in (c for c in checked if c.row.status is Status.REFUSED):
        row = refused.row
        lines += ["", f"## What {TITLES[row.engine]} {row.version} lacks", ""]
        lines += [f"* `{problem}`" for problem in refused.problems]
    lines += ["", *_patch_table(patches), ""]
    return "\n".join(lines)


def _note(row: Row) -> str:
    return f"* {TITLES[row.engine]} {row.version}, {row.platform}: {row.note.strip()}"


def _patch_table(patches: Sequence[Patch]) -> list[str]:
    lines = ["## Shims", ""]
    lines += ["What the adapters change in the engines, and until when.  A test fails"]
    lines += ["once no supported row needs one.", ""]
    lines += ["| function | symptom without it | delete when |", "|---|---|---|"]
    lines += [f"| `{s.function}` | {s.symptom} | {s.delete_when} |" for s in patches]
    return lines
