# SPDX-License-Identifier: Apache-2.0
"""Points of drafts and commits can be built, and ours run, without a GPU or peers."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # Not at the top: modules of kernel tests choose Triton's interpreter first.
    pytest.importorskip("triton")
    from benchmarks.kernel_speed import shapes, verify

    monkeypatch.setattr(verify, "peer", lambda module, name: None)
    monkeypatch.setattr(verify, "DEVICE", "cpu")
    monkeypatch.setattr(shapes, "DEVICE", "cpu")
    torch.manual_seed(0)
    return verify


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_recurrences_give_one_answer_with_a_record_or_slots(
    verify: ModuleType, tree: bool
) -> None:
    from benchmarks.kernel_speed.shapes import Head

    head = Head("tiny", 1, 2, 8, 4)
    many = Head("tiny", 2, 2, 8, 4)
    for point in (
        verify.delta_rule(head, 3, tree=tree),
        verify.delta_rule(many, 3, wide=True, tree=tree),
        verify.mamba2(head, 3, tree=tree),
    ):
        agree(verify, point)


def test_convolutions_give_one_answer_with_a_record_or_slots(
    verify: ModuleType,
) -> None:
    agree(verify, verify.convolution(16, 3))


def agree(verify: ModuleType, point: object) -> None:
    calls, before = point.calls, point.pool.clone()  # type: ignore[attr-defined]
    first = calls[verify.OURS](1).clone()
    assert torch.equal(point.pool, before)  # type: ignore[attr-defined]
    second = calls[verify.SLOTS](1)
    assert not torch.equal(point.pool, before)  # type: ignore[attr-defined]
    assert first.isfinite().all()
    assert torch.equal(first, second)


def test_a_commit_changes_the_slots_of_its_turn(verify: ModuleType) -> None:
    from benchmarks.kernel_speed.shapes import Head

    point = verify.commit(Head("tiny", 1, 2, 8, 4), 16, 3)
    before = point.pool.clone()
    point.calls[verify.OURS](0)
    changed = (point.pool != before).flatten(2).any(2)
    assert changed.sum(1).tolist() == [3] * verify.LAYERS
    assert point.pool.isfinite().all()
