# SPDX-License-Identifier: Apache-2.0
"""A pass through a mixer: single tokens first, then prompts.

Where drafts are verified, the rows with drafts are first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hybrid_plugin.mixers.state_pass import StatePass
from hybrid_plugin.mixers.verifications import Record


def mix(
    mixer: Any,
    weights: Any,
    state_pass: StatePass,
    tokens: Sequence[torch.Tensor],
    pools: Sequence[torch.Tensor],
    out: torch.Tensor,
    record: Record | None = None,
) -> None:
    """Run a pass.

    Args:
        mixer: a module of `hybrid_plugin.mixers`.
        weights: its record of the layer.
        state_pass: the sequences.
        tokens: what the mixer takes of each token, ``[T, ...]`` each.
        pools: the states in all slots, as the mixer takes them.
        out: ``[T, ...]``, written but for padding at the end.
        record: of what verified tokens do to the states; None where each leaves one.
    """
    order, end = state_pass.order, state_pass.tokens
    if order is not None:
        ordered, results = replace(state_pass, order=None), torch.empty_like(out[:end])
        chosen = [one[order] for one in tokens]
        mix(mixer, weights, ordered, chosen, pools, results, record)
        out[order] = results
        return
    first = state_pass.decodes + state_pass.verified
    begin = 0 if state_pass.same_rows else first
    # First: it writes something for rows that it does not run, a verification does not.
    if state_pass.prefills is not None:
        mixer.prefill(
            weights,
            state_pass.prefills,
            *(one[begin:end] for one in tokens),
            *pools,
            out[begin:end],
        )
    if state_pass.verifications is not None:
        mixer.verify(
            weights,
            state_pass.verifications,
            *(one[:first] for one in tokens),
            *pools,
            out[:first],
            *(() if record is None else (record,)),
        )
    elif first:
        mixer.decode(
            weights,
            state_pass.decode_slots,
            *(one[:first] for one in tokens),
            *pools,
            out[:first],
        )
