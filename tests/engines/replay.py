# SPDX-License-Identifier: Apache-2.0
"""The core alone on a stream of requests that an engine has answered, one by one."""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.core.policy.costs import CPU_PASS_TOKENS
from hybrid_plugin.core.policy.eviction import ExpectedSaving

TOKEN_BYTES = 1 << 10
"""KV of a token of the bundled model, in two attention layers of bfloat16."""


def replay(
    stream: Iterable[tuple[tuple[int, ...], tuple[int, ...]]],
    options: HybridConfig,
    pools: tuple[int, int],
    chunk: int,
    slot_bytes: float,
    *,
    chunk_by_chunk: bool,
) -> list[int]:
    """Hit tokens of each request.

    Args:
        stream: prompts and their answers, each finished before the next began.
        options: with page_size.
        pools: pages and slots.
        chunk: tokens that the engine prefills at most in one step.
        slot_bytes: states of a sequence of the bundled model.
        chunk_by_chunk: whether a prompt's pages are allocated with its chunks, or all
            at first: then they make room before its snapshots are there to do so.
    """
    assert options.page_size
    cache = HybridCache(
        pages=PagePool(pools[0]),
        slots=SlotPool(pools[1]),
        page_size=options.page_size,
        policy=options.snapshot_policy(options.page_size),
        eviction=ExpectedSaving(
            token_bytes=TOKEN_BYTES,
            slot_bytes=slot_bytes,
            pass_tokens=CPU_PASS_TOKENS,
        ),
    )
    return [
        _serve(cache, str(number), prompt, answer, chunk, chunk_by_chunk)
        for number, (prompt, answer) in enumerate(stream)
    ]


def _serve(
    cache: HybridCache,
    name: str,
    prompt: tuple[int, ...],
    answer: tuple[int, ...],
    chunk: int,
    chunk_by_chunk: bool,
) -> int:
    found = cache.look_up(prompt)
    hit, length = found.match.length, len(prompt)

    def end_of(start: int) -> int:
        end = min(start + chunk, length)
        return cache.chunk_end(found.snapshot_positions, start, end, length)

    computed = end_of(hit)
    admission = cache.admit(
        name,
        found,
        num_tokens=computed if chunk_by_chunk else length,
        reserve_tokens=length,
    )
    assert admission is not None
    cache.advance(name, computed)
    while computed < length:
        computed = end_of(computed)
        assert cache.grow(name, computed) is not None
        cache.advance(name, computed)
    # The last token of an answer is sampled, not computed.
    for length in range(len(prompt) + 1, len(prompt) + len(answer)):
        assert cache.grow(name, length) is not None
    cache.finish(name, prompt + answer, len(prompt) + len(answer) - 1)
    return admission.hit
