# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch real-gated linear recurrent unit; the CPU path."""

from __future__ import annotations

import torch

from hybrid_kernels._common.varlen import (
    CHUNK,
    boundaries,
    parent_of,
    read_state,
    spans,
    write_state,
)


def prefill(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    recurrence_gate: torch.Tensor,
    rate: torch.Tensor,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor | None,
    boundary_slots: torch.Tensor | None,
    round_boundaries: bool,
    out: torch.Tensor,
) -> None:
    """Token by token, vectorised over channels."""
    decay, gated = _gates(x, input_gate, recurrence_gate, rate)
    inflow = gated * (1 - decay.square()).clamp(min=0).sqrt()
    for span in spans(cu_seqlens):
        state = read_state(pool, slots, has_initial, span.index)
        slot = int(slots[span.index])
        fresh = slot < 0
        if has_initial is not None:
            fresh = fresh or not bool(has_initial[span.index])
        keep = dict(boundaries(boundary_slots, span))
        for done, token in enumerate(range(span.start, span.end), start=1):
            enters = gated[token] if fresh and done == 1 else inflow[token]
            state = decay[token] * state + enters
            out[token] = state
            if round_boundaries and done % CHUNK == 0:
                state = state.to(pool.dtype).float()
            if done in keep:
                write_state(pool, keep[done], state)
        write_state(pool, slot, state)


def steps(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    recurrence_gate: torch.Tensor,
    rate: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    parents: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """One or more tokens per sequence, each from its parent's state."""
    decay, gated = _gates(x, input_gate, recurrence_gate, rate)
    inflow = gated * (1 - decay.square()).clamp(min=0).sqrt()
    for row in range(x.shape[0]):
        main = read_state(pool, slots, None, row)
        states: list[torch.Tensor] = []
        for draft in range(x.shape[1]):
            parent = parent_of(parents, row, draft)
            past = main if parent < 0 else states[parent]
            state = decay[row, draft] * past + inflow[row, draft]
            out[row, draft] = state
            states.append(state.to(pool.dtype).float())
        for draft, state in enumerate(states):
            write_state(pool, int(draft_slots[row, draft]), state)


def _gates(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    recurrence_gate: torch.Tensor,
    rate: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The decay ``a``, and the gated input before its factor."""
    decay = (rate.float() * recurrence_gate.float().sigmoid()).exp()
    return decay, x.float() * input_gate.float().sigmoid()
