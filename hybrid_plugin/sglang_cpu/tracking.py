# SPDX-License-Identifier: Apache-2.0
"""Snapshots that stock SGLang takes while decoding (`extra_buffer`)."""

from __future__ import annotations

import torch
from hybrid_kernels import state_copy


def copy_tracked(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy the slots of marked rows to their tracking slots, in one layer.

    Args:
        conv_states: ``[S, *state]``, updated.
        ssm_states: ``[S, *state]``, updated.
        cache_indices: ``[N]`` slots of rows.
        mamba_track_mask: ``[N]`` bool, which rows to copy.
        mamba_track_indices: ``[N]`` slots to copy to.
        batch_size: how many rows count.
        check_freed_slots: not used; a negative slot is always skipped.
    """
    _copy(
        (conv_states, ssm_states),
        cache_indices[:batch_size],
        mamba_track_mask[:batch_size],
        mamba_track_indices[:batch_size],
        slot_dim=0,
    )


def copy_tracked_all_layers(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """The same in all layers: pools are ``[L, S, *state]``."""
    _copy(
        (conv_states_pool, ssm_states_pool),
        cache_indices[:batch_size],
        mamba_track_mask[:batch_size],
        mamba_track_indices[:batch_size],
        slot_dim=1,
    )


def _copy(
    pools: tuple[torch.Tensor, ...],
    sources: torch.Tensor,
    mask: torch.Tensor,
    destinations: torch.Tensor,
    slot_dim: int,
) -> None:
    marked = torch.where(mask, sources, -1)
    for pool in pools:
        state_copy.fork(pool, marked, destinations, slot_dim=slot_dim)
