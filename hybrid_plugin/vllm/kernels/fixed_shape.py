# SPDX-License-Identifier: Apache-2.0
"""Passes with prefills that a CUDA graph of the whole model replays.

All sequences of such a pass are rows of one `Prefills`, a decode as a row of one token:
so what is launched depends on the graph's size alone, and no longer on how many of the
sequences decode.  Where drafts are verified, they are rows of `Verifications` as well,
and either has no slot for what the other runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hybrid_plugin.core.commands import CHUNK
from hybrid_plugin.mixers.fixed_prefills import put, room
from hybrid_plugin.mixers.prefills import Prefills


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The largest of an engine's graphs with prefills, and how they trade room.

    Kernels keep a state for each chunk of a pass, and a sequence may begin and end in
    the middle of one: so much room is either for tokens or for sequences.
    """

    most: int
    """Sequences of any graph."""
    tokens: int
    """The same."""
    chunks: int
    """Of the longest pass outside of graphs, with one sequence: no graph needs more."""
    width: int = 1
    """Tokens of a sequence in the engine's graphs without prefills: with the drafts."""
    kept: frozenset[int] | None = None
    """Tokens of the graphs that are kept; None until they were captured and timed."""

    @property
    def sequences(self) -> int:
        """Of the graph that has room for most of them."""
        return self.of(0)

    def of(self, tokens: int) -> int:
        """The most sequences of a graph of so many tokens."""
        return min(self.most, max(1, 1 + (self.chunks - tokens // CHUNK) // 2))

    def rows(self, tokens: int) -> int:
        """Sequences of the graph of so many tokens, padding counted.

        Never as many as a graph without prefills has, so that shapes tell the two
        apart: 0 where only such a graph has that size.
        """
        rows = min(tokens - 1, self.of(tokens))
        return rows - 1 if rows * self.width == tokens else rows

    def hold(self, sequences: int, tokens: int) -> bool:
        """Whether a pass may be one of a graph's.

        Args:
            sequences: of the pass, padding counted.
            tokens: the same of them.

        A graph of decodes has as many tokens as sequences, one with prefills has fewer
        sequences than tokens: so the two are told apart by their shapes, when they are
        captured as when they are replayed.  One whose sequences all verify drafts has
        fewer sequences, too: there only the very shape of ours counts.  So it does once
        it is known which graphs there are: in any other pass decodes need not be rows
        of prefills.
        """
        if self.kept is not None:
            return tokens in self.kept and sequences == self.rows(tokens)
        if self.width > 1:
            return tokens <= self.tokens and sequences == self.rows(tokens)
        return sequences < tokens <= self.tokens and sequences <= self.of(tokens)


class PrefillTables:
    """The tensors of `Prefills` where CUDA graphs of all sizes find them."""

    def __init__(self, limits: GraphLimits, device: torch.device) -> None:
        """Room for the largest graph."""
        self.limits = limits
        self.rows = 0
        """Sequences of the last pass, padding counted; 0 if it is none of a graph's."""
        self._room = room(limits.tokens, limits.sequences, device)
        self._rows = torch.arange(limits.tokens, dtype=torch.int32, device=device)
        self._padding = torch.ones(limits.tokens, dtype=torch.bool, device=device)

    def fit(self, sequences: int, tokens: int) -> bool:
        """Whether the next pass is to be held here, as in `GraphLimits.hold`."""
        self.rows = 0
        return self.limits.hold(sequences, tokens)

    def hold(self, prefills: Prefills, *, keeps: bool) -> Prefills:
        """Put a pass's sequences there.

        Args:
            prefills: all sequences of the pass, padding at the end.
            keeps: whether passes may keep states: their graphs then look for boundaries
                even if this pass has none.

        Returns:
            The same, in tensors whose addresses and strides depend on nothing.
        """
        self.rows = rows = prefills.slots.shape[0]
        every = self._room
        boundary_slots = every.boundary_slots
        assert boundary_slots is not None
        held = replace(
            prefills,
            cu_seqlens=every.cu_seqlens[: rows + 1],
            slots=every.slots[:rows],
            has_initial=every.has_initial[:rows],
            offsets=every.offsets[:rows],
            boundary_slots=boundary_slots[:rows] if keeps else None,
        )
        put(held, prefills)
        return held

    def leave_one(self, tokens: int) -> None:
        """Leave the first sequence alone, with so many tokens: the rest is padding."""
        self._room.cu_seqlens[1:].fill_(tokens)

    def padding(self, held: Prefills, tokens: int) -> torch.Tensor:
        """Which of a pass's tokens no sequence has, ``[tokens]``, likewise in place.

        Args:
            held: what `hold` returned.
            tokens: of the pass, padding counted.
        """
        found = self._padding[:tokens]
        torch.ge(self._rows[:tokens], held.cu_seqlens[-1], out=found)
        return found
