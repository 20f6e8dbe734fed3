# SPDX-License-Identifier: Apache-2.0
"""What state layers do with the sequences of a forward pass, equal for every engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybrid_plugin.mixers.prefills import Prefills
from hybrid_plugin.mixers.verifications import Verifications


@dataclass(frozen=True, slots=True)
class StatePass:
    """What the layers of one state group do in a forward pass."""

    decodes: int
    """Sequences with one token, the first of the batch, padding counted."""
    tokens: int
    """Of all sequences; in a pass of a graph's with padding."""
    decode_slots: torch.Tensor
    """``[decodes]``, int32 or int64: where their states lie; negative for padding.  In
    a pass without prefills always at one address, which a CUDA graph can keep."""
    prefills: Prefills | None
    """The sequences behind them; None if there are none."""
    verifications: Verifications | None = None
    """The sequences that verify drafts, before all others: there are no decodes then.
    In a pass without prefills always at one address."""
    verified: int = 0
    """Tokens of those, padding counted."""
    order: torch.Tensor | None = None
    """``[tokens]``, int64: the pass's tokens in the order above; None if the engine has
    it too."""
    same_rows: bool = False
    """Whether both `prefills` and `verifications` have all sequences of the pass, each
    with a negative slot where the other runs one: what a CUDA graph is captured with
    that replays passes of both kinds.  All tokens are `verified` then."""
    padding: torch.Tensor | None = None
    """``[tokens]``, bool: which tokens no sequence has, in a pass of a graph's.  What
    a mixer makes of them is unspecified.  None where all are a sequence's."""
