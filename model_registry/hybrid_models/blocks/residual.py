# SPDX-License-Identifier: Apache-2.0
"""Layers whose blocks are each behind a norm, and add to the tokens.

A norm adds what the block before it has made, in the same kernel: so a layer hands its
last block's output on by itself, for the first norm of the next layer.
"""

from __future__ import annotations

import torch
from torch import nn

from hybrid_models.architecture import Architecture


class PreNormArchitecture(Architecture):
    """A decoder of such layers.

    Each takes positions ``[T]``, tokens ``[T, hidden]``, and what is to be added to
    them, as many, or None in the first one; it returns the last two of these.
    """

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Architecture.forward`; may write into `embeds`."""
        hidden, added = self.embed(ids, embeds), None
        for layer in self.layers:
            hidden, added = layer(positions, hidden, added)
        return add_and_norm(self.norm, hidden, added)[0]


def add_and_norm(
    norm: nn.Module, hidden: torch.Tensor, added: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of a sum, and the sum, ``[T, hidden]`` both.

    Args:
        norm: of a kit.
        hidden: tokens ``[T, hidden]``, which may be written into.
        added: to them, likewise; None for nothing.
    """
    if added is None:
        return norm(hidden), hidden
    normed, total = norm(added, hidden)
    return normed, total
