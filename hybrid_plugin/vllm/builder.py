# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33's builder interface, for the parts of planning that go through it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_config_builder import KVCacheConfigBuilder

from hybrid_plugin.core.memory.layout import PoolSizes
from hybrid_plugin.vllm import context_parallel, planning

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import (
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
    )


class HybridConfigBuilder(KVCacheConfigBuilder):
    """Groups layers by pool; builds the small cache that graphs are profiled on."""

    def get_kv_cache_groups(
        self, vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec]
    ) -> list[KVCacheGroupSpec]:
        """Group the layers as `planning.plan` does."""
        ranks = context_parallel.page_ranks(vllm_config)
        return planning.make_groups(kv_cache_spec, ranks)

    def get_kv_cache_config_from_groups(
        self,
        vllm_config: VllmConfig,
        kv_cache_groups: list[KVCacheGroupSpec],
        num_blocks: int,
    ) -> KVCacheConfig:
        """Every pool with `num_blocks` ids."""
        windows = planning.make_layout(kv_cache_groups).attention_windows
        sizes = PoolSizes(num_blocks, num_blocks, tuple(num_blocks for _ in windows))
        return planning.make_config(vllm_config, kv_cache_groups, sizes)
