# SPDX-License-Identifier: Apache-2.0
"""Prompts of gated delta nets whose passes keep states on the way.

Each call takes what the convolution gives, as a layer does: queries, keys and values
side by side, and what gates are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hybrid_kernels import gated_delta_rule

from hybrid_plugin.core.commands import CHUNK, most_boundaries, table_columns
from hybrid_plugin.mixers.delta_net import DeltaNet, Weights
from hybrid_plugin.mixers.long_prefill import divide
from hybrid_plugin.mixers.prefills import Prefills

from .shapes import Head, peer, randn
from .timing import OURS, ROTATE, Call, Point

_NET = DeltaNet(gated_delta_rule)
_CHECKPOINTS = (
    "state_checkpoints",
    "checkpoint_cu_starts",
    "checkpoint_every_n_tokens",
)
Function = Callable[..., Any]


@dataclass(frozen=True)
class Pass:
    """A pass whose sequences are equally long; each keeps one state."""

    sequences: int
    tokens: int
    """Of each sequence."""
    start: int = 0
    """Tokens before the pass, of each sequence that is not whole chunks."""
    scattered: bool = False
    """Whether sequences keep their states at different distances from their ends."""

    @property
    def size(self) -> str:
        """For a table."""
        name = f"{self.sequences} x {self.tokens}"
        name += f", from {self.start}" if self.start else ""
        return name + ", kept anywhere" * self.scattered

    def columns(self) -> list[int]:
        """Of each sequence, where it keeps: a few chunks before its end."""
        last = (self.start + self.tokens) // CHUNK - self.start // CHUNK - 1
        return [last - 1 - n % 3 * self.scattered for n in range(self.sequences)]

    def turns(self, device: torch.device) -> list[Prefills]:
        """The pass on slots of its own in each turn."""
        count = self.sequences
        slots = torch.arange(2 * count * ROTATE, dtype=torch.int32, device=device)
        width = table_columns(most_boundaries(self.tokens))
        bounds = torch.arange(count + 1, dtype=torch.int32, device=device)
        turns = []
        for own, kept in slots.view(ROTATE, 2, count):
            table = torch.full((count, width), -1, dtype=torch.int32, device=device)
            table[torch.arange(count), torch.tensor(self.columns())] = kept
            turns.append(
                Prefills(
                    cu_seqlens=bounds * self.tokens,
                    slots=own.contiguous(),
                    has_initial=torch.ones_like(own, dtype=torch.bool),
                    offsets=torch.full_like(own, self.start % CHUNK),
                    boundary_slots=table,
                )
            )
        return turns

    def divided(
        self, turns: list[Prefills], function: Function, columns: Iterable[int]
    ) -> list[Prefills]:
        """The same, most of them on another kernel, with states of some columns."""
        starts, lengths = [self.start] * self.sequences, [self.tokens] * self.sequences
        return [
            replace(turn, long=divide(function, turn, starts, lengths, columns))
            for turn in turns
        ]


PASSES = (
    Pass(1, 1024),
    Pass(1, 8192),
    Pass(1, 32768),
    Pass(4, 256),
    Pass(8, 1024),
    Pass(8, 4096),
    Pass(1, 8192, start=100),
    Pass(8, 1024, start=100),
    Pass(8, 1024, scattered=True),
)


def delta(head: Head, size: Pass) -> Point:
    """What follows a gated delta net's convolution."""
    total = size.sequences * size.tokens
    keys, values = head.keys * head.depth, head.values * head.width
    mixed = randn(total, 2 * keys + values)
    a, b = randn(total, head.values), randn(total, head.values)
    weights = Weights(
        convolution=mixed[:0],
        bias=None,
        activation="silu",
        A=-torch.rand(head.values, device=mixed.device),
        dt_bias=randn(head.values),
        key_heads=head.keys,
    )
    pool = head.pool(2 * size.sequences * ROTATE, 0.0)
    out = randn(total, head.values, head.width)

    def on(turns: list[Prefills]) -> Call:
        def call(index: int) -> torch.Tensor:
            return _NET.recur(weights, turns[index], mixed, a, b, pool, out)

        return call

    turns = size.turns(mixed.device)
    flashinfer = peer("flashinfer.gdn_prefill", "chunk_gated_delta_rule")
    calls: dict[str, Call | None] = {OURS: on(turns)}
    if flashinfer is not None:

        def keeps_none(**call: Any) -> Any:
            rest = {k: v for k, v in call.items() if k not in _CHECKPOINTS}
            return flashinfer(**rest)

        kept = set(size.columns())
        calls["flashinfer, states kept"] = on(size.divided(turns, flashinfer, kept))
        calls["flashinfer (none kept)"] = on(size.divided(turns, keeps_none, ()))
    name = "gated_delta_rule.prefill, states kept"
    return Point(name, head.model, size.size, calls, pool)
