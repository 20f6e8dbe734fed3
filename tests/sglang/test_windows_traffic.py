# SPDX-License-Identifier: Apache-2.0
"""Every token that attention reads is where SGLang's tables say, in its own pools.

Stands in for a model: each step writes a mark for every new token where attention
would, in both pools of a real `SWAKVPool`, and reads those that each layer reaches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, release_req
from sglang.srt.managers.scheduler_components.pool_stats_observer import (
    kv_private_swa_tokens,
    kv_private_tokens,
)
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Copy
from hybrid_plugin.core.memory.attention_windows import (
    AttentionWindow,
    ChunkedLocal,
    SlidingWindow,
)
from hybrid_plugin.core.memory.pools import NoSlots, PagePool
from hybrid_plugin.core.memory.window_tables import WindowGroup
from hybrid_plugin.sglang import token_placement
from hybrid_plugin.sglang.allocator import HybridWindowAllocator
from hybrid_plugin.sglang.pool_memory import PoolMemory
from tests.core.support import ByMinimum
from tests.sglang.broken_map import forgotten_hits
from tests.sglang.fakes import PAGE, POLICY, Batch, Bench, request

WINDOWS = {"sliding": SlidingWindow(11), "chunks": ChunkedLocal(16)}
FULL_LAYER, WINDOW_LAYER = 0, 1


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with get_context().override_server_args():
        yield


class MisreadError(AssertionError):
    """A layer would read something else than the KV that it needs."""


class WindowBench(Bench):
    """Passes of a scheduler on SGLang's own pools, and marks in place of KV."""

    chunk = 12

    def __init__(
        self, window: AttentionWindow, pages: int = 70, window_pages: int = 26
    ) -> None:
        self.window, self.window_pages = window, window_pages
        self.copied = self.retracted = 0
        super().__init__(pages, rows=7)
        self.rows.mamba_allocator = None

    def make_core(self, pages: int, slots: int) -> HybridCache:
        group = WindowGroup(self.window, PagePool(self.window_pages))
        return HybridCache(
            PagePool(pages),
            NoSlots(),
            PAGE,
            POLICY,
            windows=(group,),
            eviction=ByMinimum(),
        )

    def make_allocator(self) -> HybridWindowAllocator:
        size = (self.core.pages.capacity - 1) * PAGE
        size_swa = (self.window_pages - 1) * PAGE
        self.pool = SWAKVPool(
            size=size,
            size_swa=size_swa,
            page_size=PAGE,
            dtype=torch.float32,
            head_num=1,
            head_dim=2,
            swa_attention_layer_ids=[WINDOW_LAYER],
            full_attention_layer_ids=[FULL_LAYER],
            device="cpu",
        )
        mapping = torch.zeros(size + PAGE + 1, dtype=torch.int64)
        mapping[-1] = -1
        self.pool.register_mapping(mapping)
        stock: Any = SimpleNamespace(
            dtype=torch.float32, device="cpu", get_kvcache=lambda: self.pool
        )
        executor = PoolMemory().executor(self.pool, None, PAGE)
        run = executor.run

        def counted(commands: Any) -> None:
            copies = [c for c in commands if isinstance(c, Copy)]
            self.copied += sum(c.pool.startswith("window") for c in copies)
            run(commands)

        executor.run = counted  # type: ignore[method-assign]
        return HybridWindowAllocator(self.core, stock, executor)

    # -------------------------------------------------------------- the model

    def forward(self, batch: Batch, positions: torch.Tensor) -> None:
        """Write marks where attention writes, and look at what it reads."""
        keys = [self.pool.get_key_buffer(layer) for layer in (FULL_LAYER, WINDOW_LAYER)]
        translate = self.pool.translate_loc_from_full_to_swa
        ends = batch.seq_lens_cpu.tolist()
        new = torch.cat(
            [
                marks(req)[start:end]
                for req, start, end in zip(
                    batch.reqs, batch.prefix_lens, ends, strict=True
                )
            ]
        )
        keys[0][positions] = new[:, None, None]
        keys[1][translate(positions)] = new[:, None, None]
        for req, start, end in zip(batch.reqs, batch.prefix_lens, ends, strict=True):
            row = self.rows.req_to_token[req.kv.req_pool_idx, :end].long()
            first = self.window.first_needed(start)
            self._compare(req, keys[0][row], marks(req)[:end], "full attention")
            near = keys[1][translate(row)][first:]
            self._compare(req, near, marks(req)[first:end], "a window")

    def _compare(
        self, req: Req, found: torch.Tensor, expected: torch.Tensor, what: str
    ) -> None:
        if not torch.equal(found[:, 0, 0], expected):
            raise MisreadError(f"{what} of {req.rid}")

    def step(self, chunk: int | None = None) -> list[str]:
        """A pass, and the first tokens of the prompts that it ended."""
        ran = super().step(chunk)
        for req in self.scheduler.last_batch.reqs if ran else ():
            if req.extend_end == len(req.origin_input_ids) + len(req.output_ids):
                req.output_ids.append(7)
        return ran

    def decode(self) -> None:
        """One more token of each running request for which there is room."""
        running: Any = self.scheduler.running_batch
        while running.reqs and not self._has_room(running.reqs):
            victim = running.reqs.pop()
            self.retracted += 1
            release_req(
                req=victim,
                remaing_req_count=0,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                tree_cache=self.cache,
                hisparse_coordinator=None,
            )
            victim.reset_for_retract()
            self.scheduler.waiting_queue.append(victim)
        if running.reqs:
            self._decode(running.reqs)

    def _has_room(self, reqs: list[Req]) -> bool:
        beginning = sum(req.kv.kv_committed_len % PAGE == 0 for req in reqs)
        found: bool = self.allocator.check_decode_capacity(num_tokens=beginning * PAGE)
        return found

    def _decode(self, reqs: list[Req]) -> None:
        batch: Any = Batch(reqs, self.rows)
        lengths = [req.kv.kv_committed_len for req in reqs]
        batch.prefix_lens = lengths
        batch.seq_lens = batch.seq_lens_cpu = torch.tensor(lengths)
        batch.req_pool_indices = torch.tensor([req.kv.req_pool_idx for req in reqs])
        batch.forward_mode = ForwardMode.DECODE
        positions = token_placement.decode(self.cache, batch)
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        self.cache.step_begins(batch)
        self.forward(batch, positions)
        self.cache.step_launched(batch)
        for req in reqs:
            req.output_ids.append(7 + len(req.output_ids) % 3)

    def end(self, req: Req) -> None:
        """End a request that has its answer."""
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        release_kv_cache(req, self.cache, checkpoint=True)

    # -------------------------------------------------------------- what holds

    def check(self) -> None:
        """The map is the tables of all live sequences, and SGLang's sums are right."""
        mapping = self.pool.full_to_swa_index_mapping
        for sequence in self.core._sequences.values():
            table = sequence.windows[0]
            for page, window in zip(
                sequence.pages[table.first :], table.held(), strict=True
            ):
                assert mapping[page * PAGE] == window * PAGE
        assert mapping[-1] == -1
        last = self.scheduler.last_batch
        reqs = {*self.scheduler.running_batch.reqs, *(last.reqs if last else ())}
        owners = [req.kv for req in reqs if req.kv.holds_kv]
        (full, free), (near, near_free) = self.allocator.swa_capacity_and_available(
            full_capacity=self.pool.size, swa_capacity=self.pool.size_swa
        )
        cache = self.cache
        assert full == (
            free
            + cache.full_evictable_size()
            + cache.full_protected_size()
            + sum(kv_private_tokens(kv, PAGE) for kv in owners)
        )
        assert near == self.allocator.size_swa
        assert near == (
            near_free
            + cache.swa_evictable_size()
            + cache.swa_protected_size()
            + sum(kv_private_swa_tokens(kv, PAGE) for kv in owners)
        )


def marks(req: Req) -> torch.Tensor:
    """For each token a number that depends on all before it, and is not 0."""
    found, mark = [], 17
    for token in (*req.origin_input_ids, *req.output_ids):
        mark = (mark * 31 + token + 1) % 1_000_003 + 1
        found.append(mark)
    return torch.tensor(found, dtype=torch.float32)


def serve(bench: WindowBench, seed: int, turns: int = 80) -> None:
    """Chats with shared beginnings, some at a time; the cache is crowded."""
    rng = random.Random(seed)
    systems = [[rng.randrange(250) for _ in range(n)] for n in (21, 34)]
    chats = [list(rng.choice(systems)) for _ in range(6)]
    live: dict[int, Req] = {}
    begun = 0
    for _ in range(100_000):
        if begun == turns and not live:
            break
        chat = rng.randrange(len(chats))
        if chat not in live and len(live) < 5 and begun < turns:
            more = [rng.randrange(250) for _ in range(rng.randint(1, 20))]
            req = request(f"{chat}.{begun}", (chats[chat] + more)[:130])
            req.sampling_params.max_new_tokens = rng.randint(2, 20)
            bench.queue(req)
            live[chat] = req
            begun += 1
        if not bench.step():
            bench.decode()
        bench.check()
        for number, req in list(live.items()):
            if len(req.output_ids) >= req.sampling_params.max_new_tokens:
                bench.end(req)
                chats[number] = [*req.origin_input_ids, *req.output_ids]
                del live[number]
    assert not live, "a request waits for ever"
    assert bench.core.live == 0


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_every_token_in_reach_is_where_the_map_says(window: AttentionWindow) -> None:
    bench = WindowBench(window, pages=130, window_pages=30)
    serve(bench, seed=3)
    stats = bench.core.stats
    assert stats.hit_tokens > 500
    assert bench.copied > 5, "hits that end inside a page"
    assert stats.pages_evicted > 0 and stats.snapshots_evicted > 0


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_so_it_is_under_pressure(window: AttentionWindow) -> None:
    """Few pages of either pool: requests wait, and some are retracted."""
    bench = WindowBench(window, pages=70, window_pages=26)
    serve(bench, seed=3)
    assert bench.retracted > 5 and bench.core.stats.refusals > 5
    assert bench.core.stats.hit_tokens > 500


def test_a_map_that_lacks_what_is_resumed_is_noticed() -> None:
    """Negative control."""
    with forgotten_hits(), pytest.raises(MisreadError, match="a window"):
        serve(WindowBench(WINDOWS["sliding"]), seed=3)
