# SPDX-License-Identifier: Apache-2.0
"""Forward passes of state layers on a CPU, described by SGLang's own backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend
from sglang.srt.layers.attention.linear.gdn_backend import (
    GDNAttnBackend,
    GDNKernelDispatcher,
)
from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from hybrid_plugin.engine.kernel_choice import Mixer, Phase
from hybrid_plugin.sglang.kernels.state_layers import StateLayers

SLOTS = 12
EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED


@dataclass(frozen=True)
class Row:
    """One sequence of a pass; slot 0 is that of padded rows."""

    slot: int
    computed: int
    """Tokens before this pass."""
    length: int = 1
    """Tokens in it."""


class Pools:
    """SGLang's `HybridReqToTokenPool`: row `n` of a batch has slot `slots[n]`."""

    size = SLOTS

    def __init__(self, conv: torch.Tensor, temporal: torch.Tensor) -> None:
        self.conv, self.temporal = conv, temporal
        cache = SimpleNamespace(replayssm_rawv=None, replayssm_d=None)
        self.mamba_pool = SimpleNamespace(
            mamba_cache=cache, enable_linear_replayssm=False
        )

    def get_mamba_indices(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a batch are named by their slots here."""
        return rows.to(torch.int32)

    def translate_mamba_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """As without unified memory."""
        return indices

    def mamba2_layer_cache(self, layer_id: int) -> Any:
        """The states of the only layer."""
        return SimpleNamespace(
            conv=[self.conv],
            temporal=self.temporal,
            replayssm_d=None,
            replayssm_k=None,
            replayssm_g=None,
        )


def pools_of(
    conv: tuple[int, ...],
    temporal: tuple[int, ...],
    *,
    slot_major: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Pools:
    """Pools whose every slot holds what nobody may read.

    Args:
        conv: a slot's state of the convolution.
        temporal: its recurrent state.
        slot_major: whether a slot's states lie side by side, as in elastic pools.
        dtype: of the convolution's.
    """
    if not slot_major:
        return Pools(
            torch.full((SLOTS, *conv), torch.nan, dtype=dtype),
            torch.full((SLOTS, *temporal), torch.nan),
        )
    sizes = [torch.Size(conv).numel(), torch.Size(temporal).numel()]
    rows = torch.full((SLOTS, sum(sizes) + 3), torch.nan)
    first, second = rows[:, : sizes[0]], rows[:, sizes[0] : sum(sizes)]
    return Pools(first.unflatten(1, conv), second.unflatten(1, temporal))


def batch_of(rows: Sequence[Row], mode: ForwardMode = EXTEND) -> Any:
    """What SGLang's runner says of a pass."""
    lengths = torch.tensor([row.length for row in rows], dtype=torch.int32)
    computed = torch.tensor([row.computed for row in rows], dtype=torch.int32)
    extends = mode.is_extend()
    return SimpleNamespace(
        batch_size=len(rows),
        forward_mode=mode,
        logical_forward_mode=mode,
        req_pool_indices=torch.tensor([row.slot for row in rows]),
        seq_lens=computed + lengths,
        extend_seq_lens=lengths if extends else None,
        extend_seq_lens_cpu=lengths.tolist() if extends else None,
        extend_prefix_lens=computed if extends else None,
        extend_prefix_lens_cpu=computed.tolist() if extends else None,
        extend_start_loc=(lengths.cumsum(0) - lengths).int() if extends else None,
        extend_num_tokens=int(lengths.sum()) if extends else None,
        input_ids=torch.zeros(int(lengths.sum()), dtype=torch.int64),
        spec_info=None,
        multi_item_delimiter_indices=None,
        tbo_parent_token_range=None,
        mamba_track_mask=None,
        mamba_track_indices=None,
        mamba_track_seqlens_cpu=None,
        mamba_prefill_track_mask_cpu=None,
    )


def backend_of(kind: type, pools: Pools) -> Any:
    """SGLang's backend without what it asks the server for."""
    backend = kind.__new__(kind)
    backend.device = "cpu"
    backend.topk = 0
    backend.enable_unified_memory = False
    backend.req_to_token_pool = pools
    backend.forward_metadata = None
    backend._mamba_chunk_size = 64
    if kind is GDNAttnBackend:
        backend.enable_mis = False
        backend.mis_metadata = None
        triton = LinearAttnKernelBackend.TRITON
        backend.kernel_dispatcher = GDNKernelDispatcher(triton, triton)
        backend._use_strided_target_verify_qkv = False
    if kind is Mamba2AttnBackend:
        backend._model_runner = None
    return backend


def layers_of(mixer: Mixer, *phases: Phase, interior: Any = None) -> StateLayers:
    """Settled as said; without phases, for both."""
    layers = StateLayers()
    layers._mixer = mixer
    layers._phases = frozenset(phases or Phase)
    layers.interior = interior
    return layers


def touched(pool: torch.Tensor) -> list[int]:
    """Slots that hold something."""
    return [slot for slot in range(len(pool)) if not pool[slot].isnan().all()]
