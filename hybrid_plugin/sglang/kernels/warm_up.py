# SPDX-License-Identifier: Apache-2.0
"""Sequences that compile the kernels of prefill without touching a state.

They are run before the first pass that computes a prompt: by default that is SGLang's
own warm-up request, before a server says that it is ready.  Not earlier, because a
kernel is compiled for the strides of its inputs, which only a layer that is run has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from hybrid_plugin.core.commands import COLUMNS
from hybrid_plugin.mixers.long_prefill import LongKernel, divide
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


def long_ones(real: Prefills, kernel: LongKernel, tokens: int) -> Iterator[Prefills]:
    """The same for passes that are divided: few sequences, and as many as there may be.

    Args:
        real: as for `few_and_many`.
        kernel: that runs most of them.
        tokens: of `real`.
    """
    for count in {1, min(_COUNTS[-1], tokens)} - {0}:
        lengths = [tokens - count + 1, *[1] * (count - 1)]
        slots = torch.full_like(real.slots[:1], -1).expand(count).contiguous()
        bounds = torch.arange(count + 1, device=slots.device) + (tokens - count)
        bounds[0] = 0
        dummies = Prefills(
            cu_seqlens=bounds.to(real.cu_seqlens.dtype),
            slots=slots,
            has_initial=torch.zeros_like(slots, dtype=torch.bool),
            offsets=torch.zeros_like(slots, dtype=torch.int32),
            boundary_slots=slots[:, None].to(torch.int32).repeat(1, COLUMNS),
        )
        long = divide(kernel.function, dummies, [0] * count, lengths, range(COLUMNS))
        yield replace(dummies, long=long)
