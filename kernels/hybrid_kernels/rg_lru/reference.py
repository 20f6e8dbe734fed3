# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch real-gated linear recurrent unit; the CPU path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hybrid_kernels._common import operation
from hybrid_kernels._common.checks import check_last_contiguous, check_shape
from hybrid_kernels._common.tables import CHUNK, Drafts, Sequences
from hybrid_kernels._common.varlen import DraftStates, spans, write_state


@dataclass(frozen=True)
class Operands(operation.Operands):
    """Tokens of `D` channels."""

    PER_TOKEN: ClassVar[tuple[str, ...]] = ("x", "input_gate", "recurrence_gate")
    DIMENSIONS: ClassVar[int] = 1

    x: torch.Tensor
    """``[..., D]``."""
    input_gate: torch.Tensor
    """``[..., D]``, before the logistic function."""
    recurrence_gate: torch.Tensor
    """``[..., D]``, before the logistic function."""
    A: torch.Tensor
    """``[D]``, negative."""

    @property
    def values(self) -> torch.Tensor:
        """What the output is shaped like."""
        return self.x

    def check(self, pool: torch.Tensor) -> None:
        """Require the operands to fit each other and the pool.

        Raises:
            ValueError: if they do not.
        """
        channels = self.x.shape[-1]
        check_shape("A", self.A, (channels,))
        check_shape("pool", pool, (pool.shape[0], channels))
        for name in self.PER_TOKEN:
            tensor = getattr(self, name)
            check_shape(name, tensor, tuple(self.x.shape))
            check_last_contiguous(name, tensor)

    def gates(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The decay ``a``, and the gated input before its factor; float32."""
        decay = (self.A.float() * self.recurrence_gate.float().sigmoid()).exp()
        return decay, self.x.float() * self.input_gate.float().sigmoid()


def prefill(operands: Operands, sequences: Sequences, out: torch.Tensor) -> None:
    """Chunk by chunk, vectorised over channels and, by doubling, over tokens."""
    decay, gated = operands.gates()
    inflow = _inflow(decay, gated)
    pool = sequences.pool
    for span in spans(sequences):
        state = span.state
        if span.fresh and span.tokens:
            inflow[span.start] = gated[span.start]
        for start, end in span.parts(CHUNK):
            lines = _scan(decay[start:end], inflow[start:end], state)
            out[start:end] = lines
            state = lines[-1]
            done = end - span.start
            if sequences.round_boundaries and span.at_boundary(done):
                state = state.to(pool.dtype).float()
            write_state(pool, span.keep.get(done, -1), state)
        write_state(pool, span.slot, state)


def steps(operands: Operands, drafts: Drafts, out: torch.Tensor) -> None:
    """Run ``[N, L]`` tokens, each from its parent's state, vectorised over rows."""
    decay, gated = operands.gates()
    inflow, states = _inflow(decay, gated), DraftStates(drafts, out)
    for draft in range(out.shape[1]):
        state = decay[:, draft] * states.origin(draft) + inflow[:, draft]
        out[:, draft] = state
        states.append(state)
    states.write()


def _inflow(decay: torch.Tensor, gated: torch.Tensor) -> torch.Tensor:
    return gated * (1 - decay.square()).clamp(min=0).sqrt()


def _scan(
    decay: torch.Tensor, inflow: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """States after each of ``[C, D]`` tokens."""
    decay, lines, reach = decay.clone(), inflow.clone(), 1
    while reach < len(lines):
        lines[reach:] = lines[reach:] + decay[reach:] * lines[:-reach]
        decay[reach:] = decay[reach:] * decay[:-reach]
        reach *= 2
    return lines + decay * state
