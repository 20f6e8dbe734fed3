# SPDX-License-Identifier: Apache-2.0
"""Rings belong to slots: who writes or reads one is led from its row to its slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.dsa.kpool_plan import (
    KPoolExtendPlan,
    PoolWriteRows,
    TailWriteRows,
)

from hybrid_plugin.sglang.rings import Rings

SLOT_OF = torch.tensor([0, 4, 2, 9], dtype=torch.int32)
"""Of the request in each row; row 0 is padding."""


def rings() -> Rings:
    """Rings that were given to slots."""
    found = Rings()
    found.slots = SLOT_OF.__getitem__
    return found


def test_rows_are_led_to_slots_in_their_own_type() -> None:
    rows = torch.tensor([[3, 1], [0, 2]])
    found = rings().in_rows(rows)
    assert found.tolist() == [[9, 4], [0, 2]] and found.dtype == rows.dtype


def test_what_names_no_row_goes_to_padding() -> None:
    assert rings().in_rows(torch.tensor([-1])).tolist() == [0]


def test_without_rings_nothing_changes() -> None:
    rows = torch.tensor([3, 1])
    assert Rings().in_rows(rows) is rows


@dataclass(frozen=True)
class Described:
    """What SGLang's `DSAMetadata` has, as far as rings go."""

    kpool_extend_plan: Any


def plan() -> Any:
    """Of a pass in which rows 3 and 1 complete index keys, and row 2 leaves tokens."""
    nothing = torch.empty(0)
    writes = PoolWriteRows(torch.tensor([3, 3, 1]), *[nothing] * 5)
    tails = TailWriteRows(torch.tensor([2]), *[nothing] * 3)
    return KPoolExtendPlan(writes, tails, *[nothing] * 5, 0, None, None, None, None)


def test_a_plan_names_slots() -> None:
    given = Described(plan())
    found = rings().planned(given)
    assert found.kpool_extend_plan.writes.req.tolist() == [9, 9, 4]
    assert found.kpool_extend_plan.tails.req.tolist() == [2]
    assert given.kpool_extend_plan.writes.req.tolist() == [3, 3, 1]
    assert rings().planned(Described(None)).kpool_extend_plan is None
