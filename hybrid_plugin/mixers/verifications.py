# SPDX-License-Identifier: Apache-2.0
"""The sequences of a forward pass that verify drafts, equal for all state layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Verifications:
    """`N` sequences, each with the last known token and its drafts, a chain, packed
    along dimension 0; all tensors on the device.
    """

    cu_seqlens: torch.Tensor
    """``[N + 1]``, int32: running sum of lengths, starting at 0; none is above `L`."""
    slots: torch.Tensor
    """``[N]``, int32: where the state lies that each goes on from; negative for
    padding."""
    columns: torch.Tensor
    """``[N, L]``, int32: where the state after each token goes; negative for nowhere.
    A sequence's `slots` may be among its `columns`."""
