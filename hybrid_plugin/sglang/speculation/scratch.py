# SPDX-License-Identifier: Apache-2.0
"""The scratch in which SGLang keeps the states after drafts, all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.runtime_context import get_spec, max_speculative_num_draft_tokens

from hybrid_plugin.core.commands import Take
from hybrid_plugin.device.arena import to_device
from hybrid_plugin.device.verified import VerificationScratch


def scratch_tensors(states: Any) -> list[torch.Tensor]:
    """The tensors of SGLang's `SpeculativeState` that a verification writes first.

    Args:
        states: of a `MambaPool`; without drafts it has none of them.
    """
    temporal = getattr(states, "intermediate_ssm", None)
    windows = getattr(states, "intermediate_conv_window", None) or ()
    return [*windows, *(() if temporal is None else (temporal,))]


def rows_bytes(params: Any, rows: int, drafts: int) -> int:
    """Bytes of a scratch, no less than SGLang takes.

    Args:
        params: SGLang's `BaseLinearStateParams`.
        rows: sequences that verify at once.
        drafts: tokens that each verifies, the known one counted.
    """
    # SGLang has one row more, for padding; the windows of a chain overlap and are less.
    size: int = params.mamba_cache_per_req
    return (rows + 1) * drafts * size


class DraftScratch(VerificationScratch):
    """States after the drafts of the last verification, by the path accepted.

    Steps count along that path: 0 is the state after the known token, `a` that after
    `a` accepted drafts.  In a tree these may be any drafts; which, only the device
    knows.
    """

    def __init__(self, states: Any) -> None:
        """Take from the scratch of a pool.

        Args:
            states: SGLang's `SpeculativeState`: each scratch `[layers, rows, drafts,
                ...]`, each pool `[layers, slots, ...]`.
        """
        super().__init__(())
        pairs = (
            (states.intermediate_ssm, states.temporal),
            *zip(states.intermediate_conv_window, states.conv, strict=True),
        )
        self._pairs = [(scratch, pool) for scratch, pool in pairs if pool.numel()]
        self._path: torch.Tensor | None = None

    def note_path(self, accept_index: torch.Tensor, width: int) -> None:
        """Remember which drafts a verification accepted, once it was launched.

        Args:
            accept_index: ``[sequences, most]``: numbers of the known token and of the
                accepted drafts in the batch, in their order; -1 behind them.
            width: drafts of a sequence, the known token counted.
        """
        self._path = accept_index % width

    def take(self, commands: Sequence[Take]) -> None:
        """Copy states to slots on the current stream.

        Raises:
            RuntimeError: if nothing was verified.
        """
        if self._path is None:
            raise RuntimeError("a state is taken from a scratch that nobody wrote")
        ids = torch.tensor([(one.row, one.step, one.destination) for one in commands])
        device = self._path.device
        row, step, slot = to_device(ids.t().contiguous(), device)
        draft = self._path[row, step].long()
        for scratch, pool in self._pairs:
            pool[:, slot] = scratch[:, row, draft]


def drafts_per_step() -> int:
    """Tokens that a sequence verifies at most, the known one counted; 0 without."""
    if get_spec().speculative_algorithm is None:
        return 0
    most: int = max_speculative_num_draft_tokens()
    return most
