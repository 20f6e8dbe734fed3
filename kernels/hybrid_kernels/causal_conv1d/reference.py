# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch convolution; the CPU path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn import functional

from hybrid_kernels._common import operation
from hybrid_kernels._common.checks import check_shape, require
from hybrid_kernels._common.tables import Drafts, Sequences
from hybrid_kernels._common.varlen import DraftStates, spans, write_state

Activation = Literal["silu"] | None


@dataclass(frozen=True)
class Operands(operation.Operands):
    """Tokens of `D` channels and `W` taps for each channel."""

    PER_TOKEN: ClassVar[tuple[str, ...]] = ("x",)
    DIMENSIONS: ClassVar[int] = 1

    x: torch.Tensor
    """``[..., D]``."""
    weight: torch.Tensor
    """``[D, W]``."""
    bias: torch.Tensor | None
    """``[D]``."""
    activation: Activation

    @property
    def values(self) -> torch.Tensor:
        """What the output is shaped like."""
        return self.x

    @property
    def taps(self) -> int:
        """`W`."""
        return self.weight.shape[1]

    def check(self, pool: torch.Tensor) -> None:
        """Require the operands to fit each other and the pool.

        Raises:
            ValueError: if they do not.
        """
        channels, taps = self.x.shape[-1], self.weight.shape[-1]
        check_shape("weight", self.weight, (channels, taps))
        require(2 <= taps <= 5, f"weight has {taps} taps, expected 2 to 5")
        check_shape("pool", pool, (pool.shape[0], channels, taps - 1))
        if self.bias is not None:
            check_shape("bias", self.bias, (channels,))
        known = self.activation in (None, "silu")
        require(known, f"unknown activation {self.activation!r}")

    def check_record(self, record: torch.Tensor, pool: torch.Tensor) -> None:
        """Require a record of inputs, of the pool's type.

        Raises:
            ValueError: if it is none.
        """
        check_shape("record", record, (*record.shape[:2], self.x.shape[-1]))
        same = record.dtype == pool.dtype
        require(same, f"record is {record.dtype}, expected {pool.dtype}")

    def convolve(self, line: torch.Tensor) -> torch.Tensor:
        """``[..., D, W - 1 + n]`` inputs to ``[..., D, n]`` outputs, float32."""
        result = functional.conv1d(
            line.reshape(-1, *line.shape[-2:]),
            self.weight.float()[:, None],
            None if self.bias is None else self.bias.float(),
            groups=self.weight.shape[0],
        )
        return functional.silu(result) if self.activation == "silu" else result


def prefill(operands: Operands, sequences: Sequences, out: torch.Tensor) -> None:
    """Convolve each sequence behind its state."""
    inputs, pool = operands.taps - 1, sequences.pool
    out.zero_()
    for span in spans(sequences):
        tokens = operands.x[span.start : span.end].float()
        line = torch.cat([span.state, tokens.T], dim=1)
        if span.tokens:
            out[span.start : span.end] = operands.convolve(line)[0].T
        # Column `end` of `line` is the oldest of the W - 1 inputs before it.
        for end, slot in (*span.keep.items(), (span.tokens, span.slot)):
            write_state(pool, slot, line[:, end : end + inputs])


def steps(operands: Operands, drafts: Drafts, out: torch.Tensor) -> None:
    """Run drafts, each behind its parent's state, vectorised over rows."""
    states = DraftStates(drafts, out)
    for draft in range(states.longest):
        token = operands.x[states.index(draft)]
        line = torch.cat([states.origin(draft), token.float()[..., None]], dim=2)
        if len(line):
            states.put(out, draft, operands.convolve(line)[..., 0])
        states.append(line[..., 1:])
        states.keep(draft, token)
    states.write()
