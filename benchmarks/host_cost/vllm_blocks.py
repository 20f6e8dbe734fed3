# SPDX-License-Identifier: Apache-2.0
"""vLLM's block pool behind its KVCacheManager: KV only, blocks of one page.

A hybrid model would add a group of states and inflate the blocks; attention
alone is the cheapest that vLLM can be at this page size.  Its blocks are hashed
when a request arrives, in another thread of the same process: *hash*, which is
counted, and shown apart.  `allocate_slots` hands out pages and makes the prompt's
blocks findable in one call, which counts as *admit*.
"""

from __future__ import annotations

from array import array

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor, xxhash_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request

from benchmarks.host_cost.driver import PAGE, Laps

_HASHES = {"sha256": sha256_cbor, "xxhash": xxhash_cbor}


class VllmBlocks:
    """One attention group."""

    def __init__(self, kv_tokens: int, longest: int, hashing: str) -> None:
        self.name = f"vLLM block pool (KV only, {hashing})"
        function = _HASHES[hashing]
        init_none_hash(function)
        spec = FullAttentionSpec(
            block_size=PAGE, num_kv_heads=1, head_size=8, dtype=torch.bfloat16
        )
        self._manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=kv_tokens // PAGE + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            max_model_len=longest,
            scheduler_block_size=PAGE,
            hash_block_size=PAGE,
        )
        self._hasher = get_request_block_hasher(PAGE, function)
        self._parameters = SamplingParams(max_tokens=64)
        self._count = 0

    def serve(self, prompt: array[int], answer: array[int]) -> tuple[int, Laps]:
        """See `Driver`."""
        manager, laps = self._manager, Laps()
        ids = prompt.tolist()
        self._count += 1
        laps.start()
        request = Request(
            request_id=str(self._count),
            prompt_token_ids=ids,
            sampling_params=self._parameters,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        laps.stop("hash")
        blocks, hit, _ = manager.get_computed_blocks(request)
        laps.stop("match")
        manager.allocate_slots(request, len(ids) - hit, hit, blocks)
        laps.stop("admit")
        request.num_computed_tokens = len(ids)
        # As tokens come; each call may hash and cache one block more.
        for token in answer:
            request.append_output_token_ids(token)
        laps.start()
        manager.allocate_slots(request, len(answer) - 1)
        laps.stop("commit")
        manager.free(request)
        laps.stop("finish")
        return hit, laps

    def entries(self) -> int:
        """Blocks that can be found by a hash."""
        return len(self._manager.block_pool.cached_block_hash_to_block)
