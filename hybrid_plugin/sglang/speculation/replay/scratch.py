# SPDX-License-Identifier: Apache-2.0
"""The last verification, until its accepted drafts are folded into the states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from hybrid_kernels import replay

from hybrid_plugin.core.commands import Command, Take
from hybrid_plugin.core.sequence import LiveSequence
from hybrid_plugin.device.arena import to_device
from hybrid_plugin.device.verified import VerificationScratch
from hybrid_plugin.sglang.speculation.replay.records import Records


class Owner(NamedTuple):
    """Whose row it is."""

    name: str
    """Of the sequence; another one may get it, or the same again once it was
    retracted."""
    sequence: LiveSequence


@dataclass
class _Verification:
    """What one step verified."""

    slots: torch.Tensor
    """``[N]``, of the sequences; negative for padding."""
    accepted: torch.Tensor
    """``[N]``: one more than the index of each one's last accepted draft, the known
    token being draft 0; 0 where nothing is left to fold."""
    parents: torch.Tensor | None
    """``[N, L]``, of trees."""
    owners: list[Owner | None] = field(default_factory=list)
    """By row; None where nothing is left to fold."""

    def drop(self, rows: Sequence[int]) -> None:
        """Leave the states of these rows as they are."""
        if rows:
            self.accepted[_index(rows, self.accepted.device)] = 0
        for row in rows:
            self.owners[row] = None


class ReplayScratch(VerificationScratch):
    """Folds what a step verified before the next one begins.

    Until then a sequence's slot holds the state before the step.  So a sequence that
    ends meanwhile gets the state after exactly its known tokens: only the drafts up to
    there are folded.
    """

    def __init__(self, records: Records) -> None:
        """Fold from records that the layers write."""
        super().__init__(())
        self._records = records
        self._path: torch.Tensor | None = None
        self._verified: _Verification | None = None
        self._settled: set[Take] = set()

    def note_path(self, accept_index: torch.Tensor, width: int) -> None:
        """Remember which drafts a verification accepted, once it was launched.

        Args:
            accept_index: ``[N, most]``: numbers of the known token and of the accepted
                drafts in the batch, in their order; -1 behind them.
            width: drafts of a sequence, the known token counted.
        """
        self._path = accept_index % width

    def note_accepted(
        self,
        slots: torch.Tensor,
        accepted: torch.Tensor,
        parents: torch.Tensor | None,
    ) -> None:
        """Remember what is to be folded; the tensors must not be written any more.

        Args:
            slots: ``[N]``; negative for padding.
            accepted: ``[N]``, one more than the last accepted draft's index.
            parents: ``[N, L]``, the draft that each one follows; None for chains.

        Raises:
            RuntimeError: if the verification before was not folded.
        """
        if self._verified is not None:
            raise RuntimeError("drafts are verified before those of the last step fold")
        self._verified = _Verification(slots, accepted, parents)

    def note_owners(self, owners: Sequence[Owner | None]) -> None:
        """Remember whose rows they are.

        Args:
            owners: by row; None for a sequence that ended while the step was planned,
                whose slot may be another's by now.
        """
        if self._verified is not None:
            self._verified.owners = list(owners)
            self._verified.drop([r for r, owner in enumerate(owners) if owner is None])

    def settle(
        self,
        commands: Sequence[Command],
        is_live: Callable[[Owner], bool],
        *,
        keep_live: bool,
    ) -> None:
        """Fold on the current stream, before any of these commands runs.

        Args:
            commands: the next ones.
            is_live: whether a sequence has not ended.
            keep_live: whether drafts of live sequences stay as they are, because the
                next pass verifies none: where they end may not be known yet.

        Raises:
            RuntimeError: if a state is to be taken that nothing holds.
        """
        takes = [one for one in commands if isinstance(one, Take)]
        self._settled = set(takes)
        verified = self._verified
        if verified is None:
            if takes:
                raise RuntimeError("a state is taken from drafts that were folded")
            return
        ended = [
            row
            for row, owner in enumerate(verified.owners)
            if owner is not None and not is_live(owner)
        ]
        self._cut(verified, takes, ended)
        if not keep_live:
            self._fold(verified, verified.accepted)
            self._verified = None
        elif ended:
            index = _index(ended, verified.accepted.device)
            accepted = torch.zeros_like(verified.accepted)
            accepted[index] = verified.accepted[index]
            self._fold(verified, accepted)
            verified.drop(ended)

    def take(self, commands: Sequence[Take]) -> None:
        """The states are in their slots: `settle` folded what the sequences ended on.

        Raises:
            RuntimeError: if it was not told of these commands.
        """
        if not self._settled.issuperset(commands):
            raise RuntimeError("a state is taken before its drafts were folded")

    def _cut(
        self, verified: _Verification, takes: Sequence[Take], ended: Sequence[int]
    ) -> None:
        """Have sequences that ended end where their known tokens do."""
        if not takes:
            return
        for one in takes:
            owner = verified.owners[one.row] if one.row in ended else None
            if owner is None or owner.sequence.slot != one.destination:
                raise RuntimeError(f"row {one.row} is not that of a sequence's end")
        if self._path is None:
            raise RuntimeError("a state is taken, and nobody said what was accepted")
        table = torch.tensor([(one.row, one.step) for one in takes])
        row, step = to_device(table.t().contiguous(), verified.accepted.device)
        last = self._path[row, step] + 1
        verified.accepted[row] = last.to(verified.accepted.dtype)

    def _fold(self, verified: _Verification, accepted: torch.Tensor) -> None:
        replay.commit(
            self._records.layers, verified.slots, accepted, parents=verified.parents
        )


def _index(rows: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor(rows), device)
