# SPDX-License-Identifier: Apache-2.0
"""The core alone on a stream of requests that an engine has answered, one by one."""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.pools import PagePool, SlotPool


def replay(
    stream: Iterable[tuple[tuple[int, ...], tuple[int, ...]]],
    options: HybridConfig,
    pools: tuple[int, int],
    chunk: int,
) -> list[int]:
    """Hit tokens of each request.

    Args:
        stream: prompts and their answers, each finished before the next began.
        options: with page_size.
        pools: pages and slots.
        chunk: tokens that the engine prefills at most in one step.
    """
    assert options.page_size
    cache = HybridCache(
        pages=PagePool(pools[0]),
        slots=SlotPool(pools[1]),
        page_size=options.page_size,
        policy=options.snapshot_policy(options.page_size),
    )
    return [
        _serve(cache, str(number), prompt, answer, chunk)
        for number, (prompt, answer) in enumerate(stream)
    ]


def _serve(
    cache: HybridCache,
    name: str,
    prompt: tuple[int, ...],
    answer: tuple[int, ...],
    chunk: int,
) -> int:
    admission = cache.admit(name, cache.look_up(prompt), num_tokens=len(prompt))
    assert admission is not None
    computed = admission.hit
    while computed < len(prompt):
        end = min(computed + chunk, len(prompt))
        computed = cache.chunk_end(
            cache.snapshot_positions_of(name), computed, end, len(prompt)
        )
        cache.advance(name, computed)
    # The last token of an answer is sampled, not computed.
    for length in range(len(prompt) + 1, len(prompt) + len(answer)):
        assert cache.grow(name, length) is not None
    cache.finish(name, prompt + answer, len(prompt) + len(answer) - 1)
    return admission.hit
