# SPDX-License-Identifier: Apache-2.0
"""vLLM's own caches of Qwen4-Exp's sparse attention, without the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.models.qwen4_exp.common.qsa_cache import (
    QSACompressedKeyCache,
    QSAKeyStateCache,
    QSAMetadataBuilder,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec

PAGE = 16
RATIO = 4
"""Tokens that a key stands for."""
WIDTH = 8
KV = FullAttentionSpec(
    block_size=PAGE, num_kv_heads=2, head_size=8, dtype=torch.bfloat16
)
STATE = MambaSpec(block_size=1024, shapes=((2, 16),), dtypes=(torch.float32,))
RINGS, KEYS = ("ring 0", "ring 1"), ("keys 0", "keys 1")


class Layers:
    """Two sparse attention layers with their caches, and a state layer."""

    def __init__(
        self, *, positions: bool = False, drafts: int = 0, page: int = PAGE
    ) -> None:
        """Make the caches.

        Args:
            positions: whether rings hold coordinates besides, as with images.
            drafts: tokens that a sequence verifies.
            page: tokens of a page.
        """
        self.config: Any = SimpleNamespace(
            cache_config=SimpleNamespace(
                block_size=page, prefix_cache_retention_interval=None
            ),
            compilation_config=SimpleNamespace(static_forward_context={}),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            speculative_config=None,
            num_speculative_tokens=drafts,
        )
        given: dict[str, Any] = {
            "head_size": WIDTH,
            "dtype": torch.bfloat16,
            "cache_config": self.config.cache_config,
            "vllm_config": self.config,
            "compress_ratio": RATIO,
        }
        for name in KEYS:
            QSACompressedKeyCache(prefix=name, **given)
        for name in RINGS:
            QSAKeyStateCache(prefix=name, cache_rope_positions=positions, **given)

    @property
    def caches(self) -> dict[str, Any]:
        """By name."""
        found: dict[str, Any] = self.config.compilation_config.static_forward_context
        return found

    @property
    def specs(self) -> dict[str, KVCacheSpec]:
        """What all layers declare."""
        own = {n: c.get_kv_cache_spec(self.config) for n, c in self.caches.items()}
        return {**own, "kv 0": KV, "kv 1": KV, "state": STATE}

    def builder(self, spec: Any, names: tuple[str, ...]) -> QSAMetadataBuilder:
        """vLLM's, of what describes a pass to the layers of a group."""
        return QSAMetadataBuilder(spec, list(names), self.config, torch.device("cpu"))
