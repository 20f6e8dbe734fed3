# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch convolution; the CPU path."""

from __future__ import annotations

import torch
from torch.nn import functional

from hybrid_kernels._common.varlen import (
    boundaries,
    parent_of,
    read_state,
    spans,
    write_state,
)


def prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor | None,
    activation: str | None,
    boundary_slots: torch.Tensor | None,
    boundary_every: int,
    out: torch.Tensor,
) -> None:
    """Convolve each sequence behind its state."""
    width = weight.shape[1]
    out.zero_()
    for span in spans(cu_seqlens):
        past = read_state(pool, slots, has_initial, span.index)
        line = torch.cat([past, x[span.start : span.end].float().T], dim=1)
        if span.end > span.start:
            out[span.start : span.end] = _convolve(line, weight, bias, activation).T
        # Column `tokens` of `line` is the oldest of the W - 1 inputs before it.
        ends = [*boundaries(boundary_slots, span, boundary_every)]
        ends.append((span.end - span.start, int(slots[span.index])))
        for tokens, slot in ends:
            write_state(pool, slot, line[:, tokens : tokens + width - 1])


def step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    slots: torch.Tensor,
    draft_slots: torch.Tensor,
    parents: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
) -> None:
    """One or more tokens per sequence, each behind its parent's state."""
    if parents is None and x.shape[1] == 1:
        _step_at_once(
            x[:, 0], weight, bias, pool, slots, draft_slots[:, 0], activation, out[:, 0]
        )
        return
    for row in range(x.shape[0]):
        main = read_state(pool, slots, None, row)
        states: list[torch.Tensor] = []
        for draft in range(x.shape[1]):
            parent = parent_of(parents, row, draft)
            past = main if parent < 0 else states[parent]
            line = torch.cat([past, x[row, draft].float()[:, None]], dim=1)
            out[row, draft] = _weigh(line, weight, bias, activation)
            states.append(line[:, 1:].to(pool.dtype).float())
        for draft, state in enumerate(states):
            write_state(pool, int(draft_slots[row, draft]), state)


def _step_at_once(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    slots: torch.Tensor,
    targets: torch.Tensor,
    activation: str | None,
    out: torch.Tensor,
) -> None:
    """One token for each row, vectorised over rows."""
    past = pool[slots.long().clamp(min=0)].float()
    past[slots < 0] = 0
    lines = torch.cat([past, x.float()[..., None]], dim=2)
    out.copy_(_weigh(lines, weight, bias, activation))
    keep = targets >= 0
    pool[targets[keep].long()] = lines[keep, :, 1:].to(pool.dtype)


def _weigh(
    lines: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """``[..., D, W]`` to ``[..., D]``: the output for one token behind its past."""
    result = (lines * weight.float()).sum(-1)
    if bias is not None:
        result = result + bias.float()
    return functional.silu(result) if activation == "silu" else result


def _convolve(
    line: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """``[D, W - 1 + T]`` to ``[D, T]``."""
    result = functional.conv1d(
        line[None],
        weight.float()[:, None],
        None if bias is None else bias.float(),
        groups=line.shape[0],
    )[0]
    return functional.silu(result) if activation == "silu" else result
