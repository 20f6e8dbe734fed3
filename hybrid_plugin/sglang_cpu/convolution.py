# SPDX-License-Identifier: Apache-2.0
"""SGLang's causal convolution, on `hybrid_kernels.causal_conv1d`.

Tensors are laid out as SGLang's kernels take them: channels before tokens in
prefill, ``[S, D, W - 1]`` states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hybrid_kernels import causal_conv1d, speculative

from hybrid_plugin.sglang_cpu.draft_states import DraftStates
from hybrid_plugin.sglang_cpu.unsupported import refuse


def prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: Sequence[int],
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int = -1,
    validate_data: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve packed sequences and leave each one's inputs in its slot.

    Args:
        x: ``[D, T]``.
        weight: ``[D, W]``.
        bias: ``[D]`` or None.
        conv_states: ``[S, D, W - 1]``, updated.
        query_start_loc: ``[N + 1]``.
        seq_lens_cpu: not used; lengths follow from `query_start_loc`.
        cache_indices: ``[N]`` slots; None means 0, 1, 2, ...
        has_initial_state: ``[N]`` bool; None means that all start from zeros.
        activation: "silu", "swish" or True for SiLU; None or False for none.
        pad_slot_id: the slot of sequences that have none; negative.
        validate_data: not used; `hybrid_kernels` always checks.
        block_table: refused.

    Returns:
        ``[D, T]``.

    Raises:
        ValueError: if shapes do not fit.
        NotImplementedError: for an argument of speculative decoding.
    """
    refuse("convolution states in pages", block_table=block_table)
    count = query_start_loc.numel() - 1
    out = causal_conv1d.prefill(
        x.T,
        weight,
        bias,
        query_start_loc,
        conv_states,
        _slots(cache_indices, count),
        has_initial=(
            torch.zeros(count, dtype=torch.bool)
            if has_initial_state is None
            else has_initial_state
        ),
        activation=_activation(activation),
    )
    return out.T


def update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accept_tokens: torch.Tensor | None = None,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    retrieve_next_sibling: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    metadata: object = None,
    validate_data: bool = False,
) -> torch.Tensor:
    """Convolve one new token per sequence and advance its slot in place.

    With `intermediate_conv_window`, convolve `L` drafts of each sequence, leave its
    slot as it is, and keep the inputs before the token after each draft.

    Args:
        x: ``[N, D]``; of drafts ``[N, D, L]``.
        conv_state: ``[S, D, W - 1]``, updated; read only with drafts.
        weight: ``[D, W]``.
        bias: ``[D]`` or None.
        activation: as for `prefill`.
        conv_state_indices: ``[N]`` slots; None means 0, 1, 2, ...
        intermediate_conv_window: ``[R, M, D, W - 1]`` with ``M >= L``, written.
        intermediate_state_indices: ``[N]`` rows of it; None means 0, 1, 2, ...
        retrieve_next_token: ``[N, L]``, each draft's first child, or None for chains.
        retrieve_next_sibling: ``[N, L]``, likewise.
        retrieve_parent_token: ``[N, L]``, written: the draft that each one follows,
            -1 for none.
        pad_slot_id: the slot of padding rows; negative.
        metadata: not used.
        validate_data: not used; `hybrid_kernels` always checks.
        cache_seqlens: refused, as is `num_accept_tokens`.

    Returns:
        ``[N, D]``; of drafts ``[N, D, L]``.

    Raises:
        ValueError: if shapes do not fit.
        NotImplementedError: for circular states.
    """
    refuse("circular convolution states", cache_seqlens=cache_seqlens)
    refuse("windows that move", num_accept_tokens=num_accept_tokens)
    if intermediate_conv_window is None:
        return causal_conv1d.update(
            x,
            weight,
            bias,
            conv_state,
            _slots(conv_state_indices, x.shape[0]),
            activation=_activation(activation),
        )
    parents = None
    if retrieve_next_token is not None and retrieve_next_sibling is not None:
        parents = speculative.parents_of_links(
            retrieve_next_token, retrieve_next_sibling
        )
        if retrieve_parent_token is not None:
            retrieve_parent_token.copy_(parents)
    rows, _, drafts = x.shape
    states = DraftStates.start(conv_state, conv_state_indices, rows, drafts)
    out = causal_conv1d.verify(
        x.transpose(1, 2),
        weight,
        bias,
        states.pool,
        states.slots,
        states.draft_slots,
        parents=parents,
        activation=_activation(activation),
    )
    states.keep(intermediate_conv_window, intermediate_state_indices)
    return out.transpose(1, 2)


def _slots(indices: torch.Tensor | None, count: int) -> torch.Tensor:
    return torch.arange(count) if indices is None else indices


def _activation(name: str | bool | None) -> causal_conv1d.Activation:
    if name in ("silu", "swish", True):
        return "silu"
    if name in (None, False):
        return None
    raise ValueError(f"unknown activation {name!r}")
