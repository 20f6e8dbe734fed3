# SPDX-License-Identifier: Apache-2.0
"""Whatever we rely on is renamed upstream: the checks must say so, by its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import run_matrix

from hybrid_plugin.upstream.contracts import contracts_of
from hybrid_plugin.upstream.hookpoints import Contract
from hybrid_plugin.upstream.matrix import Row
from tests.compat.engines import rows_at_hand, source_of, view_of
from tests.compat.rename import renamed_copy


def _cases() -> Iterator[object]:
    """Every contract once, in the newest version that it applies to."""
    seen: set[str] = set()
    for row in rows_at_hand():
        for contract in contracts_of(row.engine):
            if repr(contract) not in seen and contract.applies_to(row.version):
                seen.add(repr(contract))
                yield pytest.param(row, contract, id=f"{row.name} {contract.target}")


def _check(row: Row, source: Path) -> int:
    return run_matrix.main(
        [
            "--contracts-only",
            f"--engine={row.engine}",
            f"--version={row.version}",
            f"--source={source}",
        ]
    )


@pytest.mark.parametrize(("row", "contract"), list(_cases()))
def test_contracts_fail_by_name(
    row: Row, contract: Contract, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = source_of(row)
    assert root is not None
    renamed = renamed_copy(view_of(row), root, contract, tmp_path / "renamed")
    assert _check(row, renamed) == 1
    assert contract.target in capsys.readouterr().out


@pytest.mark.parametrize("row", rows_at_hand(), ids=lambda row: row.name)
def test_contracts_hold_as_published(
    row: Row, capsys: pytest.CaptureFixture[str]
) -> None:
    source = source_of(row)
    assert source is not None
    assert _check(row, source) == 0
    assert "FAILED" not in capsys.readouterr().out
