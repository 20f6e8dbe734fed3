# SPDX-License-Identifier: Apache-2.0
"""What a forward pass of SGLang does with its sequences, as `Prefills`."""

from __future__ import annotations

from typing import Any

import torch

from hybrid_plugin.core.commands import CHUNK
from hybrid_plugin.device.interior import InteriorSnapshots
from hybrid_plugin.mixers.long_prefill import LongKernel
from hybrid_plugin.mixers.prefills import Prefills

_RECORD = "hybrid_plugin_prefills"


def prefills(
    metadata: Any,
    batch: Any,
    interior: InteriorSnapshots | None,
    *,
    round_states: bool = False,
    long: LongKernel | None = None,
) -> Prefills:
    """The sequences of a pass that computes prompts; made by its first state layer.

    SGLang makes new metadata for each pass, so the record lies there.  A pass whose
    layers do not come here leaves its orders of interior snapshots unread, which
    `InteriorSnapshots` reports.

    Args:
        metadata: SGLang's `ForwardMetadata` of the pass.
        batch: its `ForwardBatch`, running requests among them as one token each.
        interior: what the pass is to keep; None where nothing is kept.
        round_states: as in `Prefills`.
        long: for passes that are long and keep states; None where all is ours.
    """
    found: Prefills | None = getattr(metadata, _RECORD, None)
    if found is None:
        found = _made(metadata, batch, interior, round_states)
        if long is not None and found.boundary_slots is not None:
            assert interior is not None
            found = _divided(long, found, batch, interior.columns)
        keep(metadata, found)
    return found


def is_known(metadata: Any) -> bool:
    """Whether the sequences of a pass were described: then our kernels run it.

    Args:
        metadata: SGLang's `ForwardMetadata` of the pass.
    """
    return getattr(metadata, _RECORD, None) is not None


def keep(metadata: Any, found: Prefills) -> None:
    """Have the layers of a pass find its sequences.

    Args:
        metadata: SGLang's `ForwardMetadata` of the pass.
        found: its sequences.
    """
    setattr(metadata, _RECORD, found)


def _made(
    metadata: Any, batch: Any, interior: InteriorSnapshots | None, round_states: bool
) -> Prefills:
    bounds = metadata.query_start_loc
    count = bounds.numel() - 1
    slots = named(metadata.mamba_cache_indices[:count])
    computed = batch.extend_prefix_lens[:count]
    return Prefills(
        cu_seqlens=bounds,
        slots=slots,
        has_initial=computed > 0,
        offsets=(computed % CHUNK).to(torch.int32),
        boundary_slots=None if interior is None else interior.rows(slots),
        round_states=round_states,
    )


def _divided(
    long: LongKernel, found: Prefills, batch: Any, columns: frozenset[int]
) -> Prefills:
    """What SGLang has on the host is what it copied to the device; some has none."""
    lengths, starts = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    count = found.slots.numel()
    if lengths is None or starts is None or min(len(lengths), len(starts)) < count:
        return found
    return long.over(found, starts[:count], lengths[:count], columns)


def named(slots: torch.Tensor) -> torch.Tensor:
    """SGLang's slots as `Prefills` has them: slot 0 is that of all padded rows."""
    return torch.where(slots > 0, slots, -1)


def is_plain_prefill(batch: Any, metadata: Any) -> bool:
    """Whether a pass computes prompts and does nothing else with the states.

    Verification of drafts, states that SGLang's own cache tracks, and parts of a batch
    are left to SGLang.  The plugin refuses all of them at start-up.
    """
    return (
        batch.forward_mode.is_extend_without_speculative()
        and batch.tbo_parent_token_range is None
        and not metadata.has_mamba_track_mask
    )


def is_plain_decode(batch: Any, metadata: Any) -> bool:
    """Whether a pass takes sequences on by a token and does nothing else."""
    return batch.mamba_track_mask is None and metadata.replayssm_write_pos is None
