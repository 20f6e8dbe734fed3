# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch commit; the CPU path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hybrid_kernels._common.checks import require
from hybrid_kernels._common.linear import fold

if TYPE_CHECKING:
    from hybrid_kernels.replay import Layers, States, Windows


@dataclass(frozen=True)
class _Paths:
    """The accepted drafts of `n` sequences that accept any."""

    rows: torch.Tensor
    """``[n]``, of the batch."""
    slots: torch.Tensor
    """``[n]``, their main slots."""
    nodes: torch.Tensor
    """``[n, depth]``: the path's drafts in order, behind -1 where it is shorter."""

    @property
    def depths(self) -> torch.Tensor:
        """``[n]``: drafts on each path."""
        return (self.nodes >= 0).sum(1)


def commit(
    layers: Layers,
    slots: torch.Tensor,
    accepted: torch.Tensor,
    parents: torch.Tensor | None,
) -> None:
    """Fold accepted drafts, layer by layer, vectorised over sequences."""
    rows = ((slots >= 0) & (accepted > 0)).nonzero()[:, 0]
    if not rows.numel():
        return
    drafts = layers.drafts if parents is None else parents.shape[1]
    most = int(accepted[rows].max())
    require(most <= drafts, f"accepted {most}, more than {drafts} drafts")
    last = accepted[rows].long() - 1
    links = None if parents is None else parents[rows].long()
    paths = _Paths(rows, slots[rows].long(), _nodes(last, links))
    for state in layers.states:
        _fold(state, paths)
    for window in layers.windows:
        _shift(window, paths)


def _nodes(last: torch.Tensor, parents: torch.Tensor | None) -> torch.Tensor:
    node, nodes = last, []
    while (node >= 0).any():
        nodes.append(node)
        before = node - 1
        if parents is not None:
            column = node.clamp(min=0)[:, None]
            before = before.minimum(parents.gather(1, column)[:, 0])
        node = before.clamp(min=-1)
    return torch.stack(nodes[::-1], 1)


def _fold(layer: States, paths: _Paths) -> None:
    pool = layer.pool
    heads, width, depth = pool.shape[1:]
    group = heads // layer.key_heads
    state = pool[paths.slots].float()
    for node in paths.nodes.unbind(1):
        record = layer.record[paths.rows, node.clamp(min=0)]
        sizes = [layer.key_heads * depth, heads * width]
        k, u, decay = record.tensor_split((sizes[0], sum(sizes)), dim=1)
        k = k.reshape(len(k), -1, depth).repeat_interleave(group, dim=1)
        decay = decay.reshape(len(k), heads, -1)
        after = fold(state, decay, k, u.reshape(len(k), heads, width))
        after = after.to(pool.dtype).float()
        state = torch.where((node >= 0)[:, None, None, None], after, state)
    pool[paths.slots] = state.to(pool.dtype)


def _shift(layer: Windows, paths: _Paths) -> None:
    window = layer.pool[paths.slots]
    inputs, most = window.shape[2], paths.nodes.shape[1]
    kept = paths.depths[:, None] + torch.arange(inputs)
    column = kept.clamp(max=inputs - 1)[:, None].expand_as(window)
    fresh = window.gather(2, column)
    # The newest inputs are those of the path's last drafts.
    for back in range(min(inputs, most)):
        node = paths.nodes[:, most - 1 - back]
        given = layer.record[paths.rows, node.clamp(min=0)]
        at = inputs - 1 - back
        fresh[..., at] = torch.where((node >= 0)[:, None], given, fresh[..., at])
    layer.pool[paths.slots] = fresh
