# SPDX-License-Identifier: Apache-2.0
"""Sequences that compile the kernels of prefill without touching a state.

They are run before the first pass that computes a prompt: by default that is SGLang's
own warm-up request, before a server says that it is ready.  Not earlier, because a
kernel is compiled for the strides of its inputs, which only a layer that is run has.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hybrid_plugin.core.commands import COLUMNS
from hybrid_plugin.mixers.prefills import Prefills

_COUNTS = (1, 16)
"""Few sequences and a crowd: kernels may be compiled once for each."""


def few_and_many(real: Prefills) -> Iterator[Prefills]:
    """Sequences without slots over the tokens of `real`, keeping states or none."""
    tokens = real.cu_seqlens[-1:]
    for count in _COUNTS:
        slots = torch.full_like(real.slots[:1], -1).expand(count).contiguous()
        bounds = tokens.repeat(count + 1)
        bounds[0] = 0
        kept = slots[:, None].to(torch.int32).expand(-1, COLUMNS).contiguous()
        for boundary_slots in (None, kept):
            yield Prefills(
                cu_seqlens=bounds,
                slots=slots,
                has_initial=torch.zeros_like(slots, dtype=torch.bool),
                offsets=torch.zeros_like(slots, dtype=torch.int32),
                boundary_slots=boundary_slots,
                round_states=real.round_states,
            )
