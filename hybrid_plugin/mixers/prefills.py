# SPDX-License-Identifier: Apache-2.0
"""The packed sequences that a forward pass prefills, equal for all state layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Prefills:
    """`N` sequences, packed along dimension 0; all tensors on the device.

    Chunks lie at absolute multiples of 64 tokens, wherever a sequence goes on: so its
    arithmetic does not depend on how the engine splits its prompt, and states in
    the middle of a pass can be kept at positions that all sequences share.
    """

    cu_seqlens: torch.Tensor
    """``[N + 1]``, int32: running sum of lengths, starting at 0."""
    slots: torch.Tensor
    """``[N]``, int32 or int64: where each state lies; negative for padding."""
    has_initial: torch.Tensor
    """``[N]`` bool: whether the sequence goes on from the state in its slot."""
    offsets: torch.Tensor
    """``[N]``, int32: tokens computed before, modulo 64."""
    boundary_slots: torch.Tensor | None = None
    """``[N, C]``: where the state goes at the ``c``-th multiple of 64 that the sequence
    reaches in this pass; negative for nowhere.  None if no state is to be kept."""
    round_states: bool = False
    """Whether running states are rounded to the slots' type at every multiple of 64, so
    that going on from a slot gives the bits of one pass."""
    long: LongPass | None = None
    """How gated delta nets divide the pass, if another kernel is to run most of it."""


@dataclass(frozen=True, slots=True)
class Head:
    """Tokens that our kernels run first."""

    tokens: torch.Tensor
    """``[n]``, int64: rows of the pass's."""
    prefills: Prefills
    """Their sequences."""


@dataclass(frozen=True, slots=True)
class Body:
    """Tokens of `M` sequences, none empty, that begin at multiples of 64."""

    tokens: torch.Tensor
    """``[n]``, int64: rows of the pass's."""
    neighbours: slice | None
    """The same, if they lie side by side."""
    cu_seqlens: torch.Tensor
    """``[M + 1]``, int64."""
    longest: int
    """Tokens of a sequence."""
    slots: torch.Tensor
    """``[M]``: where states end; negative for padding."""
    sources: torch.Tensor
    """``[M]``: where they start; negative for zeros."""
    every: int
    """Tokens between checkpoints, a multiple of 64."""
    checkpoint_starts: torch.Tensor
    """``[M + 1]``, int64: running sum of the sequences' checkpoints."""
    kept: torch.Tensor
    """``[checkpoints]``: the slot of each; negative for one that is not kept."""


@dataclass(frozen=True, slots=True)
class LongPass:
    """A pass that `long_prefill` divides."""

    function: Callable[..., Any]
    """As in `long_prefill.LongKernel`."""
    head: Head | None
    body: Body
