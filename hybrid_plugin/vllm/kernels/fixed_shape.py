# SPDX-License-Identifier: Apache-2.0
"""Passes with prefills that a CUDA graph of the whole model replays.

All sequences of such a pass are rows of one `Prefills`, a decode as a row of one token:
so what is launched depends on the graph's size alone, and no longer on how many of the
sequences decode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hybrid_plugin.core.commands import most_boundaries, table_columns
from hybrid_plugin.mixers.prefills import Prefills

_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The largest of an engine's graphs with prefills."""

    sequences: int
    tokens: int

    def hold(self, sequences: int, tokens: int) -> bool:
        """Whether a pass may be one of a graph's.

        Args:
            sequences: of the pass, padding counted.
            tokens: the same of them.

        A graph of decodes has as many tokens as sequences, one with prefills has fewer
        sequences than tokens: so the two are told apart by their shapes, when they are
        captured as when they are replayed.
        """
        return sequences < tokens <= self.tokens and sequences <= self.sequences


class PrefillTables:
    """The tensors of `Prefills` where CUDA graphs of all sizes find them."""

    def __init__(self, limits: GraphLimits, device: torch.device) -> None:
        """Room for the largest graph."""

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = limits.sequences
        self.limits = limits
        self._cu_seqlens = room(rows + 1)
        self._slots = room(rows)
        self._has_initial = room(rows, dtype=torch.bool)
        self._offsets = room(rows)
        columns = table_columns(most_boundaries(limits.tokens))
        self._boundary_slots = room(rows, columns)

    def hold(self, prefills: Prefills, *, keeps: bool) -> Prefills:
        """Put a pass's sequences there.

        Args:
            prefills: all sequences of the pass, padding at the end.
            keeps: whether passes may keep states: their graphs then look for boundaries
                even if this pass has none.

        Returns:
            The same, in tensors whose addresses and strides depend on nothing.
        """
        rows = prefills.slots.shape[0]
        held = replace(
            prefills,
            cu_seqlens=self._cu_seqlens[: rows + 1],
            slots=self._slots[:rows],
            has_initial=self._has_initial[:rows],
            offsets=self._offsets[:rows],
            boundary_slots=self._boundary_slots[:rows] if keeps else None,
        )
        held.cu_seqlens.copy_(prefills.cu_seqlens)
        held.slots.copy_(prefills.slots)
        held.has_initial.copy_(prefills.has_initial)
        held.offsets.copy_(prefills.offsets)
        if held.boundary_slots is not None:
            held.boundary_slots.fill_(_NOWHERE)
            ordered = prefills.boundary_slots
            if ordered is not None:
                held.boundary_slots[:, : ordered.shape[1]].copy_(ordered)
        return held
