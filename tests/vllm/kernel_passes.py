# SPDX-License-Identifier: Apache-2.0
"""Forward passes of state layers on a CPU, described by vLLM's own builders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.linear_attn import LinearAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.short_conv_attn import (
    ShortConvAttentionMetadataBuilder,
)

SLOTS = 12


@dataclass(frozen=True)
class Row:
    """One sequence of a pass."""

    slot: int
    computed: int
    """Tokens before this pass."""
    length: int
    """Tokens in it."""
    in_prompt: bool = True


PADDING = Row(0, 0, 0, in_prompt=False)
"""Of a graph with more sequences than a pass."""


def common_of(rows: Sequence[Row]) -> CommonAttentionMetadata:
    """What vLLM's runner says of a batch, sequences with one token first."""
    lengths = torch.tensor([row.length for row in rows], dtype=torch.int32)
    starts = torch.zeros(len(rows) + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, out=starts[1:])
    ends = torch.tensor([row.computed + row.length for row in rows], dtype=torch.int32)
    table = torch.tensor([[row.slot] for row in rows], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=ends,
        seq_lens_cpu_upper_bound=ends,
        num_reqs=len(rows),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(lengths.max()),
        max_seq_len=int(ends.max()),
        block_table_tensor=table,
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        is_prefilling=torch.tensor([row.in_prompt for row in rows]),
    )


def shaped(
    rows: Sequence[Row], graph: tuple[int, int] | None
) -> tuple[CommonAttentionMetadata, int]:
    """What vLLM's runner says of a batch that a graph replays, and the batch's tokens.

    Args:
        rows: its sequences.
        graph: sequences and tokens of the graph; None without one.
    """
    tokens = sum(row.length for row in rows)
    count, length = graph or (len(rows), tokens)
    padded = [*rows, *[PADDING] * (count - len(rows))]
    return replace(common_of(padded), num_actual_tokens=length), tokens


def config_with(layers: dict[str, Any], most: int = 8) -> Any:
    """As much of an engine's configuration as builders and the adapter read."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context=layers,
            max_cudagraph_capture_size=None,
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False),
        ),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        scheduler_config=SimpleNamespace(max_num_seqs=most),
    )


def gdn_builder(layers: dict[str, Any]) -> GDNAttentionMetadataBuilder:
    """vLLM's, without what it asks the platform for."""
    builder = GDNAttentionMetadataBuilder.__new__(GDNAttentionMetadataBuilder)
    builder.layer_names = list(layers)
    builder.vllm_config = config_with(layers)
    builder.device = torch.device("cpu")
    builder.kv_cache_spec = SimpleNamespace()
    builder.use_spec_decode = False
    builder.use_full_cuda_graph = False
    builder.gdn_prefill_backend = "triton"
    builder.checkpoint_builder = SimpleNamespace(build=lambda *_: None)
    return builder


def mamba2_builder(layers: dict[str, Any]) -> Mamba2AttentionMetadataBuilder:
    """The same of Mamba-2."""
    builder = Mamba2AttentionMetadataBuilder.__new__(Mamba2AttentionMetadataBuilder)
    builder.layer_names = list(layers)
    builder.vllm_config = config_with(layers)
    builder.compilation_config = builder.vllm_config.compilation_config
    builder.device = torch.device("cpu")
    builder.kv_cache_spec = SimpleNamespace()
    builder.chunk_size = 64
    builder.num_spec_tokens = 0
    builder.decode_cudagraph_max_bs = 8
    builder.use_spec_decode = False
    builder.use_replayssm = builder.use_flashinfer_replayssm = False
    builder.checkpoint_builder = SimpleNamespace(build=lambda *_: None)
    return builder


def linear_builder(layers: dict[str, Any]) -> LinearAttentionMetadataBuilder:
    """The same of linear attention."""
    builder = LinearAttentionMetadataBuilder.__new__(LinearAttentionMetadataBuilder)
    builder.layer_names = list(layers)
    builder.vllm_config = config_with(layers)
    builder.device = torch.device("cpu")
    builder.kv_cache_spec = SimpleNamespace()
    return builder


def short_conv_builder(layers: dict[str, Any]) -> ShortConvAttentionMetadataBuilder:
    """The same of short convolutions."""
    builder = ShortConvAttentionMetadataBuilder.__new__(
        ShortConvAttentionMetadataBuilder
    )
    builder.layer_names = list(layers)
    builder.vllm_config = config_with(layers)
    builder.compilation_config = builder.vllm_config.compilation_config
    builder.device = torch.device("cpu")
    builder.kv_cache_spec = SimpleNamespace()
    builder.num_spec_tokens = 0
    builder.decode_cudagraph_max_bs = 8
    builder.use_spec_decode = False
    builder.use_replayssm = builder.use_flashinfer_replayssm = False
    return builder
