# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch Mamba-1 selective scan; the CPU path."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from hybrid_kernels._common.varlen import (
    CHUNK,
    boundaries,
    parent_of,
    read_state,
    spans,
    write_state,
)


@dataclass(frozen=True)
class Inputs:
    """The operands of one call; see the package's text for shapes."""

    x: torch.Tensor
    dt: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    skip: torch.Tensor | None
    gate: torch.Tensor | None
    bias: torch.Tensor | None

    def times(self) -> torch.Tensor:
        """Softplus of the time steps, float32."""
        shifted = self.dt.float()
        if self.bias is not None:
            shifted = shifted + self.bias.float()
        return functional.softplus(shifted)

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """Add the skip connection and apply the gate."""
        if self.skip is not None:
            y = y + self.x.float() * self.skip.float()
        return y if self.gate is None else y * functional.silu(self.gate.float())


def prefill(
    inputs: Inputs,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor | None,
    boundary_slots: torch.Tensor | None,
    round_boundaries: bool,
    out: torch.Tensor,
) -> None:
    """Token by token, vectorised over channels."""
    result = torch.zeros_like(inputs.x, dtype=torch.float32)
    time = inputs.times()
    for span in spans(cu_seqlens):
        state = read_state(pool, slots, has_initial, span.index)
        keep = dict(boundaries(boundary_slots, span))
        for done, token in enumerate(range(span.start, span.end), start=1):
            result[token], state = _token(inputs, time, token, state)
            if round_boundaries and done % CHUNK == 0:
                state = state.to(pool.dtype).float()
            if done in keep:
                write_state(pool, keep[done], state)
        write_state(pool, int(slots[span.index]), state)
    out.copy_(inputs.finish(result))


def steps(
    inputs: Inputs,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    parents: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """One or more tokens per sequence, each from its parent's state."""
    result = torch.zeros_like(inputs.x, dtype=torch.float32)
    time = inputs.times()
    for row in range(draft_slots.shape[0]):
        main = read_state(pool, slots, None, row)
        states: list[torch.Tensor] = []
        for draft in range(draft_slots.shape[1]):
            parent = parent_of(parents, row, draft)
            past = main if parent < 0 else states[parent]
            result[row, draft], state = _token(inputs, time, (row, draft), past)
            states.append(state.to(pool.dtype).float())
        for draft, state in enumerate(states):
            write_state(pool, int(draft_slots[row, draft]), state)
    out.copy_(inputs.finish(result))


def _token(
    inputs: Inputs,
    time: torch.Tensor,
    index: int | tuple[int, int],
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    step = time[index][:, None]
    inflow = step * inputs.x[index].float()[:, None] * inputs.b[index].float()
    state = state * (step * inputs.a.float()).exp() + inflow
    return state @ inputs.c[index].float(), state
