# SPDX-License-Identifier: Apache-2.0
"""States beyond what kernels address in 32 bits: other kernels, or no such pools.

A kernel that multiplies a slot's number by the elements between two slots in 32
bits reads and writes another slot's state where the product does not fit.
`docs/kernels.md` lists which kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, hybrid_kda_config

from hybrid_plugin.sglang.kernels import model_class

LIMIT = 1 << 31
"""Elements that are certain to be addressed; unsigned offsets reach twice as far."""

_CHECKED = frozenset(
    {
        "FalconH1Config",
        "GraniteMoeHybridConfig",
        "NemotronHConfig",
        "NemotronH_Nano_VL_V2_Config",
    }
)
"""Mamba-2 configurations of SGLang whose kernels are known to compute in 64 bits."""


def is_beyond(tensor: torch.Tensor) -> bool:
    """Whether an element of the tensor lies behind `LIMIT` others."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * step for size, step in steps) >= LIMIT


def addressable_bytes(model: Any, params: Any) -> int | None:
    """Bytes of slot-major states that the model's kernels reach; None for no limit.

    Args:
        model: SGLang's `ModelConfig`.
        params: of its states, SGLang's `BaseLinearStateParams`.
    """
    if hybrid_gdn_config(model) or hybrid_kda_config(model):
        return None
    name = type(model.hf_config).__name__
    # Our own classes run `hybrid_kernels` and PyTorch's indexing, which do as well.
    if name in _CHECKED or model_class.is_own(model.hf_config):
        return None
    return LIMIT * min(params.dtype.conv.itemsize, params.dtype.temporal.itemsize)


def convolve_prefill(
    original: Callable[..., None],
    twin: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    cache_indices: torch.Tensor | None,
    has_initial_state: torch.Tensor | None,
    silu_activation: bool,
    pad_slot_id: int,
) -> None:
    """Convolve in place, by the kernel that reaches all of the states.

    Args:
        original: SGLang's CUDA kernel, which takes the rest.
        twin: its Triton kernel.
        x: `[channels, tokens]`, or `[batch, channels, tokens]`.
        weight: `[channels, width]`.
        bias: `[channels]`.
        conv_states: `[slots, channels, width - 1]`.
        query_start_loc: `[sequences + 1]`.
        cache_indices: `[sequences]`, the slot of each.
        has_initial_state: `[sequences]`.
        silu_activation: applied to what comes out.
        pad_slot_id: the slot of sequences to skip.

    Raises:
        RuntimeError: for states that no kernel reaches.
    """
    if conv_states is None or not is_beyond(conv_states):
        original(
            x,
            weight,
            bias,
            conv_states,
            query_start_loc,
            cache_indices,
            has_initial_state,
            silu_activation,
            pad_slot_id,
        )
        return
    if query_start_loc is None:
        raise RuntimeError(
            "hybrid-plugin: convolution states beyond 2**31 elements are only served "
            "for sequences of one batch; set elastic to false."
        )
    lengths = query_start_loc.diff().tolist()
    out = twin(
        x,
        weight,
        bias,
        conv_states=conv_states,
        query_start_loc=query_start_loc,
        seq_lens_cpu=lengths,
        cache_indices=cache_indices,
        has_initial_state=has_initial_state,
        activation="silu" if silu_activation else None,
        pad_slot_id=pad_slot_id,
    )
    x.copy_(out)


def convolve_step(
    original: Callable[..., None],
    twin: Callable[..., torch.Tensor],
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu_activation: bool,
    cache_seqlens: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
    pad_slot_id: int,
) -> None:
    """Convolve one token of each sequence in place, likewise.

    Args:
        original: SGLang's CUDA kernel, which takes the rest.
        twin: its Triton kernel.
        x: `[sequences, channels, tokens]`.
        conv_state: `[slots, channels, width - 1]`.
        weight: `[channels, width]`.
        bias: `[channels]`.
        silu_activation: applied to what comes out.
        cache_seqlens: `[sequences]`, for states that are rings.
        conv_state_indices: `[sequences]`, the slot of each.
        pad_slot_id: the slot of sequences to skip.
    """
    if not is_beyond(conv_state):
        original(
            x,
            conv_state,
            weight,
            bias,
            silu_activation,
            cache_seqlens,
            conv_state_indices,
            pad_slot_id,
        )
        return
    out = twin(
        x,
        conv_state,
        weight,
        bias=bias,
        activation="silu" if silu_activation else None,
        cache_seqlens=cache_seqlens,
        conv_state_indices=conv_state_indices,
        pad_slot_id=pad_slot_id,
    )
    x.copy_(out)
