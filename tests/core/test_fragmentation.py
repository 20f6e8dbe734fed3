# SPDX-License-Identifier: Apache-2.0
"""A sequence alone finds room in the end, however its pages lie.

In elastic pools with windows: KV pages that were taken one by one keep granules, of
which the windows would need one.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.attention_windows import ChunkedLocal, SlidingWindow
from hybrid_plugin.core.memory.fragmentation import FragmentationRelief
from hybrid_plugin.core.sequence import LiveSequence
from tests.core.elastic import ElasticEngine, ElasticSetup
from tests.core.profiles import SOAK_FACTOR
from tests.core.requests import Access
from tests.core.support import Tiers

TIGHT = ElasticSetup(
    page_size=1,
    pages=32,
    has_states=False,
    windows=((SlidingWindow(17), 0),),
    pages_per_granule=4,
    page_bytes=2,
    budget=66,
    lagging=True,
    full_fit=True,
    chunk_end_min=2,
    max_running=4,
    economical=False,
)
EPISODES = 50 * SOAK_FACTOR
ACCESSES = (Access.NORMAL, Access.NORMAL, Access.NORMAL, Access.PRIVATE)


class NoRelief(FragmentationRelief):
    """Leaves everything where it is."""

    def refused_growth(self, sequence: LiveSequence, pages: int) -> None:
        pass

    def refused_hit(self) -> None:
        pass


class Unrelieved(HybridCache):
    """A cache that leaves what is fragmented as it is."""

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        self.fragmentation = NoRelief(self.memory, self._sequences)
        self._admissions._fragmentation = self.fragmentation


def three_requests(cls: type[HybridCache] = HybridCache) -> ElasticEngine:
    """The last of them finds no room alone, and it gets the same pages each time."""
    engine = ElasticEngine(TIGHT, cls)
    engine.submit((0, 1, 2, 1, 1, 0, 2, 2, 2, 2, 2), 9)
    engine.step(16)
    engine.step(3)
    engine.submit((0, 1, 0, 1), 1, namespace="adapter")
    long = (0, 1, 1, 1, 1, 2, 0, 1, 2, 1, 2, 0, 0, 1, 2, 1, 0, 2, 1)
    engine.submit(long, 10, limit=13)
    engine.step(3)
    return engine


def test_a_sequence_alone_begins_again_in_empty_pools() -> None:
    engine = three_requests()
    for _ in range(60):
        engine.step(64)
        engine.check()
    assert not engine.running and not engine.waiting
    assert engine.finished == 3
    assert engine.cache.stats.pools_emptied == 1


def test_it_is_alone_until_it_gets_further() -> None:
    """Nothing of it is cached meanwhile: it fills the granules that it keeps."""
    engine = three_requests()
    while not engine.cache.stats.pools_emptied:
        engine.step(64)
    (request,) = engine.waiting
    wanted, _ = request.refused_alone
    assert engine.cache.levels()["kv"].cached == 0
    engine.submit((0, 1, 2), 2)
    engine.step(64)
    sequence = engine.cache.sequence(request.seq_id)
    assert not sequence.cacheable
    while len(sequence.pages) < wanted:
        assert engine.running == [request] and len(engine.waiting) == 1
        assert engine.cache.levels()["kv"].cached == 0
        engine.step(64)
    assert len(engine.running) == 2


def test_a_hit_that_leaves_no_room_is_evicted() -> None:
    """It would leave none at any later time either."""
    with pytest.raises(AssertionError, match="it is refused"):
        serve_long(40, Unrelieved)
    assert serve_long(40) == 1


def test_without_that_it_is_preempted_for_ever() -> None:
    engine = three_requests(Unrelieved)
    with pytest.raises(AssertionError, match="preempted for ever"):
        for _ in range(60):
            engine.step(64)


def tight_setup(rng: random.Random) -> ElasticSetup:
    """Pools of a few large granules, and windows that reach far."""
    windows = [
        SlidingWindow(rng.choice((9, 17, 33))),
        ChunkedLocal(rng.choice((7, 16, 32))),
    ]
    rng.shuffle(windows)
    windows = windows[: rng.choice((1, 1, 2))]
    per, page_bytes = rng.choice((2, 4, 4, 8)), rng.choice((1, 2, 3))
    has_states, slots = rng.random() < 0.4, rng.randint(2, 4)
    budget = rng.randint(4, 7) * per * (page_bytes + len(windows))
    budget += 3 * slots * has_states + rng.randint(0, per * page_bytes)
    return replace(
        TIGHT,
        pages=budget // (page_bytes * per) * per,
        slots=budget // 3,
        has_states=has_states,
        windows=tuple((window, 0) for window in windows),
        pages_per_granule=per,
        page_bytes=page_bytes,
        budget=budget,
        lagging=rng.random() < 0.5,
        full_fit=rng.random() < 0.5,
        compacts=rng.random() < 0.7,
    )


def serve_long(seed: int, cls: type[HybridCache] = HybridCache) -> int:
    """Serve sequences that mostly need much of the memory; how often it was emptied."""
    rng = random.Random(f"fragmented/{seed}")
    engine = ElasticEngine(tight_setup(rng), cls)
    engine.watch_refusals = False
    most = max(engine.setup.max_length, 2)
    for _ in range(40):
        if len(engine.waiting) < 4 and rng.random() < 0.5:
            length = max(rng.randint(2, most), rng.randint(2, most))
            engine.submit(
                tuple(rng.randrange(2) for _ in range(length)),
                rng.randint(1, length - 1),
                namespace=rng.choice((None, None, "adapter")),
                access=rng.choice(ACCESSES),
            )
        engine.step(rng.choice((1, 3, 5, 16, 64)))
    for _ in range(600):
        if not engine.running and not engine.waiting:
            break
        engine.step(64)
    assert not engine.running and not engine.waiting, "requests starve"
    engine.check()
    return engine.cache.stats.pools_emptied


def test_nobody_starves() -> None:
    emptied = 0
    for seed in range(EPISODES):
        try:
            emptied += serve_long(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert emptied > 2, "hardly anything is fragmented"
