# SPDX-License-Identifier: Apache-2.0
"""The sequences of a forward pass that verify drafts, equal for all state layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Verifications:
    """`N` sequences, each with the last known token and its drafts, packed along
    dimension 0; all tensors on the device.
    """

    cu_seqlens: torch.Tensor
    """``[N + 1]``, int32: running sum of lengths, starting at 0; none is above `L`."""
    slots: torch.Tensor
    """``[N]``, int32: where the state lies that each goes on from; negative for
    padding."""
    columns: torch.Tensor | None
    """``[N, L]``, int32: where the state after each token goes; negative for nowhere.
    A sequence's `slots` may be among its `columns`.  None where a `Record` is kept."""
    parents: torch.Tensor | None = None
    """``[N, L]``, of trees: the token that each one follows, -1 for the first."""


@dataclass(frozen=True, slots=True)
class Record:
    """What the tokens do to the states of one layer, for `hybrid_kernels.replay`."""

    states: torch.Tensor
    """``[R, L, record_size]``, float32, of the recurrence."""
    inputs: torch.Tensor
    """``[R, L, D]``, of the convolution, in its states' type."""
