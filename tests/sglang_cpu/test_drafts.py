# SPDX-License-Identifier: Apache-2.0
"""Drafts on the CPU platform: states, trees, tokens and attention, beside replays."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from hybrid_plugin.sglang_cpu import (
    convolution,
    delta_rule,
    draft_attention,
    draft_states,
    draft_tokens,
    draft_trees,
    mamba2,
)

ROWS, DRAFTS, SLOTS, LAYERS = 2, 5, 4, 2
CHAIN = [-1, 0, 1, 2, 3]
TREE = [-1, 0, 0, 1, 2]
SLOT_OF = torch.tensor([3, 1])
SCRATCH_ROWS = torch.tensor([2, 0])
SHAPES = pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])

trees = st.integers(1, 8).flatmap(
    lambda size: st.tuples(*(st.integers(0, node - 1) for node in range(1, size)))
)
"""The parents of all nodes but the root."""


def path_to(parents: list[int], draft: int) -> list[int]:
    """The drafts from the root to one of them."""
    path: list[int] = []
    while draft >= 0:
        path.insert(0, draft)
        draft = parents[draft]
    return path


def links(parents: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """First children and next siblings of equal trees, ``[ROWS, drafts]``."""
    mask = mask_of(parents).repeat(ROWS, 1, 1)
    found = [torch.empty(ROWS, len(parents), dtype=torch.long) for _ in range(3)]
    draft_trees.links_of_mask(
        mask.view(-1),
        torch.zeros(ROWS, dtype=torch.long),
        torch.empty(ROWS * len(parents), dtype=torch.long),
        *found,
        ROWS,
        len(parents),
    )
    return found[1], found[2]


def mask_of(parents: list[int]) -> torch.Tensor:
    """``[drafts, drafts]``, whether one sees another."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for draft in range(len(parents)):
        mask[draft, path_to(parents, draft)] = True
    return mask


def parents_or_none(parents: list[int]) -> torch.Tensor | None:
    if parents == CHAIN:
        return None
    rows = torch.tensor(parents).repeat(ROWS, 1)
    rows[:, 0] = 77  # SGLang leaves what it finds there
    return rows


def assert_replayed(
    parents: list[int],
    out: torch.Tensor,
    buffer: torch.Tensor,
    replay: Callable[[int, list[int]], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Each draft gives what the path to it gives, token by token.

    Args:
        parents: of the tree.
        out: ``[ROWS, DRAFTS, ...]``.
        buffer: ``[rows, DRAFTS, *state]``.
        replay: of a row, the last output and the state after a path.
    """
    for row in range(ROWS):
        for draft in range(DRAFTS):
            last, state = replay(row, path_to(parents, draft))
            torch.testing.assert_close(out[row, draft], last)
            torch.testing.assert_close(buffer[SCRATCH_ROWS[row], draft], state)


@SHAPES
def test_delta_rule_verifies(parents: list[int]) -> None:
    torch.manual_seed(0)
    total = ROWS * DRAFTS
    q, k = torch.randn(2, 1, total, 2, 8)
    v = torch.randn(1, total, 4, 6)
    a, b = torch.randn(2, total, 4)
    rate, bias = torch.randn(2, 4)
    pool = torch.randn(SLOTS, 4, 6, 8)
    before = pool.clone()
    buffer = torch.full((3, DRAFTS, 4, 6, 8), torch.nan)
    out = delta_rule.verify(
        rate,
        a,
        bias,
        1.0,
        20.0,
        q,
        k,
        v,
        b,
        pool,
        SLOT_OF,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.arange(ROWS + 1) * DRAFTS,
        disable_state_update=True,
        intermediate_states_buffer=buffer,
        intermediate_state_indices=SCRATCH_ROWS,
        retrieve_parent_token=parents_or_none(parents),
    )
    assert torch.equal(pool, before)

    def replay(row: int, path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        own = before[SLOT_OF[row]][None].clone()
        last = torch.empty(1, 1, 4, 6)
        for draft in path:
            at = slice(row * DRAFTS + draft, row * DRAFTS + draft + 1)
            mixed = torch.cat([x[0, at].flatten(1) for x in (q, k, v)], dim=1)
            zero = torch.zeros(1, dtype=torch.long)
            delta_rule.update(
                mixed, a[at], b[at], rate, bias, 8**-0.5, own, last, zero, True
            )
        return last[0, 0], own[0]

    assert_replayed(parents, out[0].view(ROWS, DRAFTS, 4, 6), buffer, replay)


@SHAPES
def test_mamba2_verifies(parents: list[int]) -> None:
    torch.manual_seed(0)
    heads, width, depth = 4, 6, 8
    x = torch.randn(ROWS, DRAFTS, heads, width)
    dt = torch.randn(ROWS, DRAFTS, heads, 1).expand(-1, -1, -1, width)
    keys, queries = torch.randn(2, ROWS, DRAFTS, 2, depth)
    rate = torch.rand(heads).neg()[:, None, None].expand(-1, width, depth)
    skip, bias = torch.randn(2, heads, 1).expand(-1, -1, width)
    backend = SimpleNamespace(_enable_stochastic_rounding=False)
    pool = torch.randn(SLOTS, heads, width, depth)
    before = pool.clone()
    buffer = torch.full((3, DRAFTS, heads, width, depth), torch.nan)
    out = torch.empty_like(x)
    mamba2.update(
        backend,
        pool,
        x,
        dt,
        rate,
        keys,
        queries,
        skip,
        dt_bias=bias,
        dt_softplus=True,
        state_batch_indices=SLOT_OF,
        out=out,
        disable_state_update=True,
        intermediate_states_buffer=buffer,
        cache_steps=DRAFTS,
        retrieve_parent_token=parents_or_none(parents),
        intermediate_state_indices=SCRATCH_ROWS,
    )
    assert torch.equal(pool, before)

    def replay(row: int, path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        own = before[SLOT_OF[row]][None].clone()
        last = torch.empty(1, heads, width)
        for draft in path:
            step = (row, slice(draft, draft + 1))
            mamba2.update(
                backend,
                own,
                x[step],
                dt[step],
                rate,
                keys[step],
                queries[step],
                skip,
                dt_bias=bias,
                dt_softplus=True,
                out=last,
            )
        return last[0], own[0]

    assert_replayed(parents, out, buffer, replay)


@pytest.mark.parametrize(
    ("parents", "shared"),
    [(CHAIN, False), (CHAIN, True), (TREE, False)],
    ids=["chain", "chain of shared inputs", "tree"],
)
def test_convolution_verifies(parents: list[int], shared: bool) -> None:
    torch.manual_seed(0)
    channels, taps = 6, 4
    x = torch.randn(ROWS, channels, DRAFTS)
    weight, bias = torch.randn(channels, taps), torch.randn(channels)
    pool = torch.randn(SLOTS, channels, taps - 1)
    before = pool.clone()
    buffer = torch.full((3, DRAFTS, channels, taps - 1), torch.nan)
    if shared:
        memory = torch.full((3, channels, DRAFTS + taps - 2), torch.nan)
        steps = memory.stride()
        buffer = memory.as_strided(buffer.shape, (steps[0], 1, steps[1], 1))
    found = torch.full((ROWS, DRAFTS), -7)
    child, sibling = links(parents)
    tree: dict[str, Any] = {} if parents == CHAIN else {"retrieve_next_token": child}
    if tree:
        tree |= {"retrieve_next_sibling": sibling, "retrieve_parent_token": found}
    out = convolution.update(
        x,
        pool,
        weight,
        bias,
        "silu",
        conv_state_indices=SLOT_OF,
        intermediate_conv_window=buffer,
        intermediate_state_indices=SCRATCH_ROWS,
        **tree,
    )
    assert torch.equal(pool, before)
    assert not tree or found.tolist() == [parents] * ROWS

    def replay(row: int, path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        own = before[SLOT_OF[row]][None].clone()
        last = torch.empty(0)
        for draft in path:
            last = convolution.update(x[row, None, :, draft], own, weight, bias, "silu")
        return last[0], own[0]

    assert_replayed(parents, out.transpose(1, 2), buffer, replay)


def test_accepted_states_are_committed() -> None:
    pool = torch.zeros(LAYERS, SLOTS, 3)
    scratch = torch.arange(LAYERS * 2 * DRAFTS * 3.0).view(LAYERS, 2, DRAFTS, 3)
    draft_states.commit(pool, scratch, torch.tensor([2, 1]), torch.tensor([4, -1]))
    assert torch.equal(pool[:, 2], scratch[:, 0, 4])
    assert not pool[:, [0, 1, 3]].any()
    draft_states.commit_windows(
        [(pool, scratch)],
        torch.tensor([3, 1]),
        torch.tensor([0, 1]),
        torch.tensor([0, -1]),
        torch.tensor([2, 2]),
    )
    assert torch.equal(pool[:, [3, 1]], scratch[:, [0, 1], [0, 1]])
    assert torch.equal(pool[:, 0], scratch[:, 0, 2])


@given(trees)
def test_links_lead_to_every_child(below: tuple[int, ...]) -> None:
    parents = [-1, *below]
    child, sibling = links(parents)
    for node in range(len(parents)):
        found, at = [], int(child[0, node])
        while at >= 0:
            found.append(at)
            at = int(sibling[0, at])
        assert found == [n for n, parent in enumerate(parents) if parent == node]


@given(trees, st.lists(st.integers(0, 2), min_size=8, max_size=8), st.data())
def test_what_is_accepted_is_what_the_model_says(
    below: tuple[int, ...], says: list[int], data: st.DataObject
) -> None:
    """Along the tree from its root, as long as a child is the predicted token."""
    parents = [-1, *below]
    count = len(parents)
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    child, sibling = links(parents)
    predicts = torch.full((ROWS * count,), -7, dtype=torch.int32)
    path = torch.full((ROWS, count), -1, dtype=torch.int32)
    lens = torch.empty(ROWS, dtype=torch.int32)
    draft_trees.accept(
        predicts,
        path,
        lens,
        torch.tensor(tokens).repeat(ROWS, 1),
        torch.arange(ROWS * count).view(ROWS, count),
        child,
        sibling,
        torch.tensor(says[:count]).repeat(ROWS, 1),
    )
    expected = [0]
    while True:
        fitting = [
            node
            for node, parent in enumerate(parents)
            if parent == expected[-1] and tokens[node] == says[expected[-1]]
        ]
        if not fitting:
            break
        expected.append(fitting[0])
    for row in range(ROWS):
        own = [row * count + node for node in expected]
        assert path[row].tolist() == own + [-1] * (count - len(own))
        assert lens[row] == len(expected) - 1
        assert predicts[own].tolist() == [says[node] for node in expected]


def test_what_is_sampled_is_distributed_as_the_model_says() -> None:
    """Over a grid of chances: the first token behind the root, and the second one."""
    parents, tokens = [-1, 0, 0, 1], [0, 1, 2, 0]
    says = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.1, 0.3], [0.1, 0.8, 0.1], [1, 0, 0]])
    child, sibling = links(parents)
    steps = [(n + 0.5) / 20 for n in range(20)]
    first, second = torch.zeros(3), torch.zeros(3, 3)
    for at_root in steps:
        for below in steps:
            for last in steps:
                predicts = torch.full((4,), -7, dtype=torch.int32)
                path = torch.full((1, 4), -1, dtype=torch.int32)
                count = torch.empty(1, dtype=torch.int32)
                draft_trees.sample(
                    predicts,
                    path,
                    count,
                    torch.tensor([tokens]),
                    torch.arange(4)[None],
                    child[:1],
                    sibling[:1],
                    torch.tensor([[at_root, below, below, below]]),
                    torch.tensor([last]),
                    says[None],
                    torch.zeros_like(says)[None],
                    1.0,
                    1.0,
                )
                drawn = predicts[path[0, : int(count) + 1].long()].tolist()
                first[drawn[0]] += 1
                if len(drawn) > 1:
                    second[drawn[0], drawn[1]] += 1
    torch.testing.assert_close(first / first.sum(), says[0], atol=0.01, rtol=0)
    for token, node in ((1, 1), (2, 2)):
        found = second[token] / second[token].sum()
        torch.testing.assert_close(found, says[node], atol=0.01, rtol=0)


def test_a_tree_is_built_of_what_eagle_proposes() -> None:
    """Two tokens behind the root, two behind each of these, two behind two of those."""
    # Proposals 0 and 1 follow the root; 2 and 3 follow 0; 4 and 5 follow 1; 6 and 7
    # follow 3, 8 and 9 follow 4.
    parent_list = torch.tensor([[-1, 0, 1, 3, 4]])
    chosen = torch.tensor([[0, 1, 3, 4, 7]])
    parents, length = [-1, 0, 0, 1, 2, 3], 3
    for mode in (0, 1):
        width = 6 + length if mode == 0 else 6
        mask = torch.zeros(6 * width, dtype=torch.bool)
        positions = torch.empty(6, dtype=torch.long)
        found = [torch.empty(1, 6, dtype=torch.long) for _ in range(3)]
        draft_trees.build(
            parent_list,
            chosen,
            torch.tensor([length]),
            mask,
            positions,
            *found,
            2,
            3,
            6,
            mode,
        )
        assert positions.tolist() == [3, 4, 4, 5, 5, 6]
        assert torch.equal(mask.view(6, -1)[:, -6:], mask_of(parents))
        assert mode == 1 or mask.view(6, -1)[:, :length].all()
        child, sibling = links(parents)
        assert torch.equal(found[1], child[:1]) and torch.equal(found[2], sibling[:1])
        assert found[0].tolist() == [list(range(6))]


def test_tokens_of_rows() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([3, 1]), torch.tensor([5, 4])
    found = draft_tokens.positions_of_rows(rows, table, start, end, 2, 3, "cpu")
    assert found.tolist() == [23, 24, 1, 2, 3]
    draft_tokens.write_rows(rows, table, start, end, found + 50, 2)
    assert table[2].tolist() == [20, 21, 22, 73, 74, 25, 26, 27, 28, 29]
    assert table[0].tolist() == [0, 51, 52, 53, 4, 5, 6, 7, 8, 9]


def test_accepted_tokens_move_to_the_front() -> None:
    where = torch.arange(8) + 30
    path = torch.tensor([[0, 2, -1], [4, 5, 7]], dtype=torch.int32)
    source, target = torch.zeros(2, 6, dtype=torch.long)
    draft_tokens.accepted_positions(path, where, source, 6)
    draft_tokens.first_of_windows(torch.tensor([2, 3]), where, target)
    assert source.tolist() == [30, 32, 34, 35, 37, 0]
    assert target.tolist() == [30, 31, 34, 35, 36, 0]
    last = torch.empty(2, dtype=torch.int32)
    draft_tokens.last_tokens(torch.arange(6), torch.tensor([2, 3]), last, 3, 2)
    assert last.tolist() == [1, 5]


@settings(deadline=None)
@given(trees, st.integers(0, 5), st.booleans())
def test_attention_sees_the_past_and_ancestors(
    below: tuple[int, ...], length: int, full: bool
) -> None:
    """Each draft attends as the last token of the path to it would."""
    torch.manual_seed(0)
    parents = [-1, *below]
    count = len(parents)
    lengths = torch.tensor([length, length + 1])
    keys, values = torch.randn(2, 40, 2, 8)
    q = torch.randn(2 * count, 4, 8)
    table = torch.randperm(40)[:34].view(2, 17)
    mask = mask_of(parents)
    parts = [
        torch.cat([torch.ones(count, full * int(n), dtype=torch.bool), mask], 1)
        for n in lengths
    ]
    flat = torch.cat([part.flatten() for part in parts])
    among = draft_attention.mask_among_drafts(flat, lengths, count)
    assert torch.equal(among, mask.repeat(2, 1, 1))
    out = draft_attention.attend(q, keys, values, table, lengths, among, 0.3)
    for row, before in enumerate(lengths.tolist()):
        for draft in range(count):
            seen = [*range(before), *(before + n for n in path_to(parents, draft))]
            places = table[row, seen]
            expected = scaled_dot_product_attention(
                q[row * count + draft][None, :, None],
                keys[places].transpose(0, 1)[None],
                values[places].transpose(0, 1)[None],
                scale=0.3,
                enable_gqa=True,
            )
            torch.testing.assert_close(out[row * count + draft], expected[0, :, 0])


def test_drafts_without_a_mask_are_chains() -> None:
    found = draft_attention.mask_among_drafts(None, torch.tensor([3]), 3)
    assert torch.equal(found[0], mask_of([-1, 0, 1]))
    with pytest.raises(ValueError, match="mask of 7"):
        draft_attention.mask_among_drafts(
            torch.ones(7, dtype=torch.bool), torch.tensor([3]), 3
        )
