# SPDX-License-Identifier: Apache-2.0
"""Shapes of draft trees, in the form the `verify` operations take.

A tree of `L` drafts per sequence is a row of parent indices ``[N, L]``: the draft
each draft follows, -1 for the main state. Parents come before their children. A
chain is ``[-1, 0, 1, ...]``; the `verify` operations also take None for it.

These functions are a few tensor operations, not kernels: they run once per step,
not once per layer. They work on any device, never wait for it, and can be
captured in a CUDA graph.
"""

from __future__ import annotations

import torch

from hybrid_kernels._common.checks import check_index, require

__all__ = ["accepted_columns", "parents_of_links", "parents_of_mask"]


def parents_of_links(
    first_child: torch.Tensor, next_sibling: torch.Tensor
) -> torch.Tensor:
    """Parent indices of trees given as first-child / next-sibling links.

    Args:
        first_child: ``[N, L]``, each node's first child, negative if it has none.
            Node 0 is the root: the token verified first, whose parent is the main
            state. Every other node is some node's child.
        next_sibling: ``[N, L]``, each node's next sibling, negative if none.

    Returns:
        ``[N, L]``, int32. Nodes that no link reaches get -1.

    Raises:
        ValueError: if the shapes differ.
    """
    require(first_child.ndim == 2, "first_child has not 2 dimensions")
    rows, drafts = first_child.shape
    check_index("first_child", first_child, (rows, drafts))
    check_index("next_sibling", next_sibling, (rows, drafts))
    parents = torch.full(
        (rows, drafts + 1), -1, dtype=torch.int32, device=first_child.device
    )
    for node in range(drafts):
        # A node's number is smaller than its child's and its next sibling's, so
        # its own parent is final when its turn comes. Absent links write into the
        # surplus column.
        numbers = torch.full_like(parents[:, :1], node)
        for links, value in (
            (first_child, numbers),
            (next_sibling, parents[:, node : node + 1].clone()),
        ):
            link = links[:, node : node + 1].long()
            parents.scatter_(1, torch.where(link < 0, drafts, link), value)
    return parents[:, :drafts].contiguous()


def parents_of_mask(mask: torch.Tensor) -> torch.Tensor:
    """Parent indices of trees given as attention masks among drafts.

    Args:
        mask: ``[N, L, L]`` bool; ``mask[n, i, j]`` says that `j` is `i` or one of
            its ancestors. Ancestors come before their descendants.

    Returns:
        ``[N, L]``, int32: the last ancestor before each draft.

    Raises:
        ValueError: if the mask is not square.
    """
    require(
        mask.ndim == 3 and mask.shape[1] == mask.shape[2],
        f"mask has shape {tuple(mask.shape)}, expected [N, L, L]",
    )
    order = torch.arange(mask.shape[2], device=mask.device, dtype=torch.int32)
    earlier = mask.bool() & (order[None, :] < order[:, None])
    return torch.where(earlier, order, -1).amax(dim=2)


def accepted_columns(last_accepted: torch.Tensor) -> torch.Tensor:
    """Column of a slot table ``[N, 1 + L]`` that `state_copy.promote` takes.

    Args:
        last_accepted: ``[N]``, index of the last accepted draft, -1 if none.

    Returns:
        ``[N]``: 0 keeps the main state.
    """
    return last_accepted.clamp(min=-1) + 1
