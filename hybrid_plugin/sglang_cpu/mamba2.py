# SPDX-License-Identifier: Apache-2.0
"""SGLang's Mamba-2 kernels, on `hybrid_kernels.ssd`.

`H` heads of `P` channels, `G` groups, `D` state dimensions, `T` packed tokens, `N`
sequences, `S` slots.
"""

from __future__ import annotations

from typing import Protocol

import torch
from hybrid_kernels import ssd

from hybrid_plugin.sglang_cpu import mamba1
from hybrid_plugin.sglang_cpu.chunk_states import CHUNK, ChunkStates
from hybrid_plugin.sglang_cpu.draft_states import DraftStates, parents_below_roots
from hybrid_plugin.sglang_cpu.unsupported import refuse

NO_LIMIT = (0.0, float("inf"))


def prefill(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    out: torch.Tensor | None = None,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
    return_track_states: bool = False,
    track_seq_idx: torch.Tensor | None = None,
    track_end_locs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Run packed sequences; return their final states, and those to be tracked.

    Args:
        x: ``[1, T, H, P]``.
        dt: ``[1, T, H]``, before softplus.
        A: ``[H]``, negative.
        B: ``[1, T, G, D]``.
        C: ``[1, T, G, D]``.
        chunk_size: of the grid that tracked positions lie on.
        D: ``[H]`` or None.
        z: ``[1, T, H, P]`` or None.
        dt_bias: ``[H]`` or None.
        initial_states: ``[N, H, P, D]``, or None for zeros.
        seq_idx: not used, as `chunk_indices` and `chunk_offsets`: sequences are
            told apart by `cu_seqlens`.
        cu_seqlens: ``[N + 1]``.
        dt_softplus: True.
        dt_limit: no limit.
        out: ``[1, T, H, P]``, written.
        return_final_states: refused.
        return_varlen_states: True.
        return_intermediate_states: not used.
        state_dtype: of the states returned; that of `C` if None.
        return_track_states: True.
        track_seq_idx: ``[n]`` sequences to track, or None.
        track_end_locs: ``[n]`` packed positions in them, or None.

    Returns:
        ``[1, ceil(T / chunk_size), H, P, D]``, the state in front of each packed
        position that is a multiple of `chunk_size`: NaN where that is not at a
        multiple of 64 tokens of a sequence, which tracking does not read.
        ``[N, H, P, D]``, the final states.
        ``[1, n, H, P, D]``, the states at the tracked positions, or None.

    Raises:
        ValueError: if shapes do not fit.
        NotImplementedError: for a way of calling it that SGLang's Mamba-2 mixer
            does not use.
    """
    refuse(
        "final states beside those of sequences",
        return_final_states=return_final_states,
    )
    if not (dt_softplus and return_varlen_states and return_track_states):
        raise NotImplementedError("only the call of SGLang's Mamba-2 mixer is served")
    if cu_seqlens is None or out is None:
        raise ValueError("prefill needs cu_seqlens and out")
    if tuple(dt_limit) != NO_LIMIT:
        raise NotImplementedError(f"time steps limited to {dt_limit} are not supported")
    count = cu_seqlens.numel() - 1
    if initial_states is None:
        initial_states = x.new_zeros(
            (count, *x.shape[2:], B.shape[-1]), dtype=torch.float32
        )
    states = ChunkStates.start(initial_states, None, cu_seqlens)
    ssd.prefill(
        x[0],
        dt[0],
        A,
        B[0],
        C[0],
        cu_seqlens,
        states.pool,
        states.running,
        skip=D,
        gate=None if z is None else z[0],
        dt_bias=dt_bias,
        boundary_slots=states.boundary_slots,
        out=out[0],
    )
    dtype = state_dtype or C.dtype
    tracked = None
    if track_seq_idx is not None and track_end_locs is not None:
        sequences = track_seq_idx.long()
        tokens = track_end_locs.long() - cu_seqlens[sequences].long()
        tracked = states.at(sequences, tokens)[None].to(dtype)
    grid = _on_grid(states, cu_seqlens, x.shape[1], chunk_size)
    return grid[None].to(dtype), states.final().to(dtype), tracked


def _on_grid(
    states: ChunkStates, cu_seqlens: torch.Tensor, total: int, chunk_size: int
) -> torch.Tensor:
    """States at multiples of `chunk_size` in the packed batch; NaN where unknown."""
    positions = torch.arange(0, total, chunk_size)
    bounds = cu_seqlens.long()
    # The last sequence that begins at or before a position; not an empty one.
    sequences = torch.searchsorted(bounds, positions, right=True) - 1
    grid = states.pool.new_full((positions.numel(), *states.pool.shape[1:]), torch.nan)
    known = sequences < bounds.numel() - 1
    tokens = positions - bounds[sequences]
    known &= tokens % CHUNK == 0
    grid[known] = states.at(sequences[known], tokens[known])
    return grid


class Backend(Protocol):
    """What `update` reads of SGLang's backend."""

    _enable_stochastic_rounding: bool


def update(
    self: Backend,
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    out: torch.Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
) -> None:
    """Run one new token per sequence and advance its slot in place.

    With `intermediate_states_buffer`, run `L` drafts of each sequence, leave its slot
    as it is, and keep the state after each draft.

    Args:
        self: SGLang's `TritonSSUBackend`.
        state: ``[S, H, P, D]``, updated; read only with drafts.
        x: ``[N, H, P]``; of drafts ``[N, L, H, P]``, and so all below.
        dt: ``[N, H, P]``, before softplus, one number per head.
        A: ``[H, P, D]``, negative, one number per head; of Mamba-1 all are its own,
            and all shapes are those of `mamba1.update`.
        B: ``[N, G, D]``.
        C: ``[N, G, D]``.
        D: ``[H, P]``, one number per head, or None.
        z: ``[N, H, P]`` or None.
        dt_bias: ``[H, P]``, one number per head, or None.
        dt_softplus: True.
        state_batch_indices: ``[N]`` slots; None means 0, 1, 2, ...
        pad_slot_id: the slot of padding rows; negative.
        out: ``[N, H, P]``, written.
        disable_state_update: True with drafts, and only then.
        intermediate_states_buffer: ``[R, M, H, P, D]`` with ``M >= L``, written.
        cache_steps: not used; `M` says it.
        retrieve_parent_token: ``[N, L]``, the draft that each one follows; None for
            chains.
        intermediate_state_indices: ``[N]`` rows of the buffer.

    Raises:
        ValueError: if shapes do not fit.
        NotImplementedError: for drafts of Mamba-1 or stochastic rounding.
    """
    refuse("stochastic rounding", rounding=self._enable_stochastic_rounding)
    drafts = intermediate_states_buffer is not None
    is_mamba1 = mamba1.has_full_decay(A)
    if not dt_softplus or x.ndim != 3 + drafts or (is_mamba1 and drafts):
        raise NotImplementedError(
            "SGLang on the platform hybrid_cpu does not support this way of updating "
            "states, nor drafts for Mamba-1; run without it, or use a GPU."
        )
    if disable_state_update is not drafts:
        raise NotImplementedError("either a step, or a verification that keeps states")
    if out is None:
        raise ValueError("update needs out")
    slots = (
        torch.arange(x.shape[0]) if state_batch_indices is None else state_batch_indices
    )
    if is_mamba1:
        mamba1.update(state, x, dt, A, B, C, slots, D=D, z=z, dt_bias=dt_bias, out=out)
        return
    operands = (x, dt[..., 0], A[:, 0, 0], B, C)
    skip = None if D is None else D[:, 0]
    bias = None if dt_bias is None else dt_bias[:, 0]
    if intermediate_states_buffer is None:
        ssd.update(*operands, state, slots, skip=skip, gate=z, dt_bias=bias, out=out)
        return
    states = DraftStates.start(state, slots, x.shape[0], x.shape[1])
    ssd.verify(
        *operands,
        states.pool,
        states.slots,
        states.draft_slots,
        parents=parents_below_roots(retrieve_parent_token),
        skip=skip,
        gate=z,
        dt_bias=bias,
        out=out,
    )
    states.keep(intermediate_states_buffer, intermediate_state_indices)
