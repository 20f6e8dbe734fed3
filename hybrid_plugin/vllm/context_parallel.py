# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism: the KV of each sequence is sharded over a group of ranks.

vLLM interleaves the tokens of a sequence over the ranks.  A page is what one row of a
block table names, and every rank has its own part of it behind the same id:
`block_size` rows.  So a page holds the tokens of all ranks, and `specs.tokens_in_page`
is the one place that says how many.

Nothing behind that asks which rank has a token.  Where a hit ends inside a page, every
rank copies its whole part: rows of tokens beyond the hit are written anew before they
are read, as without ranks.  State layers are divided by their heads, as by tensor
parallelism alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybrid_plugin.engine import untried

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from hybrid_plugin.config import HybridConfig


def page_ranks(vllm_config: VllmConfig) -> int:
    """Ranks over which the tokens of a page are interleaved."""
    return int(vllm_config.parallel_config.decode_context_parallel_size)


def interleave_size(vllm_config: VllmConfig) -> int:
    """Adjacent tokens on one rank; a rank's rows of a page are a multiple."""
    if page_ranks(vllm_config) == 1:
        return 1
    return int(vllm_config.parallel_config.cp_kv_cache_interleave_size)


def obstacles(vllm_config: VllmConfig, options: HybridConfig) -> Iterator[str]:
    """Sentences about what the plugin does not serve with such ranks.

    Args:
        vllm_config: of an engine.
        options: of the plugin.
    """
    if vllm_config.parallel_config.prefill_context_parallel_size > 1:
        yield (
            "prefill context parallelism is not supported yet; drop "
            "--prefill-context-parallel-size."
        )
    if page_ranks(vllm_config) > 1:
        yield from _beside_decodes(vllm_config, options)


def _beside_decodes(vllm_config: VllmConfig, options: HybridConfig) -> Iterator[str]:
    from vllm.platforms import current_platform

    if untried.is_refused(untried.CONTEXT):
        yield (
            "decode context parallelism is not supported yet; drop "
            "--decode-context-parallel-size."
        )
    if current_platform.is_cpu():
        yield (
            "vLLM's attention on CPUs has no decode context parallelism; drop "
            "--decode-context-parallel-size."
        )
    if vllm_config.speculative_config is not None:
        yield (
            "drafts are not served with decode context parallelism yet; drop "
            "--speculative-config."
        )
    for given in options.outer_options:
        yield (
            f"{given.option} is not served with decode context parallelism yet, whose "
            "ranks have every other token of a page; leave one of them out."
        )
    if options.is_deterministic:
        yield (
            "deterministic is not promised with decode context parallelism, which adds "
            "up what is cached and what is new apart; leave one of them out."
        )
