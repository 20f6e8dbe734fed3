# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hybrid_kernels import gated_delta_rule, speculative, state_copy
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Breadth-first parent lists whose node 0 is the only root."""
    size = draw(st.integers(1, 10))
    parents = [-1]
    for node in range(1, size):
        parents.append(draw(st.integers(max(parents[-1], 0), node - 1)))
    return parents


@given(trees())
@settings(max_examples=40, deadline=None)
def test_links_and_masks_give_the_parents_back(parents: list[int]) -> None:
    size = len(parents)
    child, sibling = torch.full((2, size), -1), torch.full((2, size), -1)
    mask = torch.zeros(2, size, size, dtype=torch.bool)
    for node, parent in enumerate(parents):
        mask[:, node, node] = True
        if parent >= 0:
            mask[:, node] |= mask[:, parent]
            brothers = [n for n in range(1, node) if parents[n] == parent]
            if brothers:
                sibling[:, brothers[-1]] = node
            else:
                child[:, parent] = node
    expected = [parents, parents]
    assert speculative.parents_of_links(child, sibling).tolist() == expected
    assert speculative.parents_of_mask(mask).tolist() == expected


@pytest.mark.parametrize("swap", [False, True], ids=["copy", "swap"])
def test_accepting_a_branch_leaves_the_state_of_its_replay(swap: bool) -> None:
    """Verify a tree, accept the path 0 -> 2, promote: as if two tokens were run."""
    mask = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    parents = speculative.parents_of_mask(mask)
    assert parents.tolist() == [[-1, 0, 0]]
    shapes = {"q": (1, 8), "k": (1, 8), "v": (1, 4)}
    inputs = {name: torch.randn(1, 3, *shape) for name, shape in shapes.items()}
    inputs |= {"g": -torch.rand(1, 3, 1), "beta": torch.rand(1, 3, 1)}
    pool = torch.randn(4, 1, 4, 8)
    expected, zero = pool[:1].clone(), torch.tensor([0])
    for token in (0, 2):
        step = {name: x[:, token] for name, x in inputs.items()}
        gated_delta_rule.update(**step, pool=expected, slots=zero)
    table = torch.tensor([[0, 1, 2, 3]])
    gated_delta_rule.verify(
        **inputs,
        pool=pool,
        slots=table[:, 0],
        draft_slots=table[:, 1:],
        parents=parents,
    )
    column = speculative.accepted_columns(torch.tensor([2]))
    if swap:
        state_copy.promote_swap(table, column)
    else:
        state_copy.promote(pool, table, column)
    torch.testing.assert_close(pool[table[0, 0]], expected[0])


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError):
        speculative.parents_of_links(torch.zeros(1, 3).int(), torch.zeros(1, 2).int())
    with pytest.raises(ValueError):
        speculative.parents_of_mask(torch.ones(2, 3, 4, dtype=torch.bool))
