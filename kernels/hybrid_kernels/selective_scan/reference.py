# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch Mamba-1 selective scan; the CPU path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from hybrid_kernels._common import operation
from hybrid_kernels._common.checks import check_last_contiguous, check_shape
from hybrid_kernels._common.tables import Drafts, Sequences
from hybrid_kernels._common.varlen import DraftStates, spans, write_state


@dataclass(frozen=True)
class Operands(operation.Operands):
    """Tokens of `I` channels with `D` state dimensions each."""

    PER_TOKEN: ClassVar[tuple[str, ...]] = ("x", "dt", "B", "C", "gate")
    DIMENSIONS: ClassVar[int] = 1

    x: torch.Tensor
    """``[..., I]``."""
    dt: torch.Tensor
    """``[..., I]``, before softplus."""
    A: torch.Tensor
    """``[I, D]``, negative."""
    B: torch.Tensor
    """``[..., D]``."""
    C: torch.Tensor
    """``[..., D]``."""
    skip: torch.Tensor | None
    """``[I]``."""
    gate: torch.Tensor | None
    """``[..., I]``."""
    dt_bias: torch.Tensor | None
    """``[I]``, added to `dt`."""

    @property
    def values(self) -> torch.Tensor:
        """What the output is shaped like."""
        return self.x

    def check(self, pool: torch.Tensor) -> None:
        """Require the operands to fit each other and the pool.

        Raises:
            ValueError: if they do not.
        """
        lead, channels, depth = self.x.shape[:-1], self.x.shape[-1], self.B.shape[-1]
        shapes: dict[str, tuple[int, ...]] = {
            "x": (*lead, channels),
            "dt": (*lead, channels),
            "gate": (*lead, channels),
            "B": (*lead, depth),
            "C": (*lead, depth),
            "A": (channels, depth),
            "skip": (channels,),
            "dt_bias": (channels,),
        }
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is not None:
                check_shape(name, tensor, shape)
                check_last_contiguous(name, tensor)
        check_shape("pool", pool, (pool.shape[0], channels, depth))

    def times(self) -> torch.Tensor:
        """Softplus of the time steps, float32."""
        shifted = self.dt.float()
        if self.dt_bias is not None:
            shifted = shifted + self.dt_bias.float()
        return functional.softplus(shifted)

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """Add the skip connection and apply the gate."""
        if self.skip is not None:
            y = y + self.x.float() * self.skip.float()
        return y if self.gate is None else y * functional.silu(self.gate.float())


def prefill(operands: Operands, sequences: Sequences, out: torch.Tensor) -> None:
    """Token by token, vectorised over channels."""
    result = torch.zeros_like(out, dtype=torch.float32)
    time, pool = operands.times(), sequences.pool
    for span in spans(sequences):
        state = span.state
        for done, token in enumerate(range(span.start, span.end), start=1):
            result[token], state = _advance(operands, time, token, state)
            if sequences.round_boundaries and span.at_boundary(done):
                state = state.to(pool.dtype).float()
            write_state(pool, span.keep.get(done, -1), state)
        write_state(pool, span.slot, state)
    out.copy_(operands.finish(result))


def steps(operands: Operands, drafts: Drafts, out: torch.Tensor) -> None:
    """Run ``[N, L]`` tokens, each from its parent's state, vectorised over rows."""
    result = torch.zeros_like(out, dtype=torch.float32)
    time, states = operands.times(), DraftStates(drafts, out)
    for draft in range(out.shape[1]):
        index = (slice(None), draft)
        result[index], state = _advance(operands, time, index, states.origin(draft))
        states.append(state)
    states.write()
    out.copy_(operands.finish(result))


def _advance(
    operands: Operands,
    time: torch.Tensor,
    index: int | tuple[slice, int],
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs ``[..., I]`` and states ``[..., I, D]`` after one token."""
    step = time[index][..., None]
    inflow = step * operands.x[index].float()[..., None]
    inflow = inflow * operands.B[index].float()[..., None, :]
    state = state * (step * operands.A.float()).exp() + inflow
    return (state @ operands.C[index].float()[..., None])[..., 0], state
