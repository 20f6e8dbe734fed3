# SPDX-License-Identifier: Apache-2.0
"""Token positions from the core's pages, in SGLang's tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.pools import PagePool, SlotPool
from hybrid_plugin.sglang import token_placement

PAGE = 4


class Rows:
    """As much of SGLang's `ReqToTokenPool` as placing needs."""

    def __init__(self, rows: int, width: int) -> None:
        self.req_to_token = torch.full((rows, width), -7, dtype=torch.int32)
        self._free = list(range(1, rows))

    def alloc(self, reqs: list[Any]) -> list[int] | None:
        if sum(not req.kv.holds_kv for req in reqs) > len(self._free):
            return None
        for req in reqs:
            if not req.kv.holds_kv:
                req.kv.req_pool_idx, req.kv.holds_kv = self._free.pop(0), True
        return [req.kv.req_pool_idx for req in reqs]

    def available_size(self) -> int:
        return len(self._free)

    def write(self, where: Any, values: torch.Tensor) -> None:
        self.req_to_token[where] = values


class Bench:
    """A core cache, a table and requests on them."""

    def __init__(self, pages: int = 40) -> None:
        policy = HybridConfig().snapshot_policy(PAGE)
        self.core = HybridCache(PagePool(pages), SlotPool(8), PAGE, policy)
        self.cache: Any = SimpleNamespace(
            cache=self.core,
            page_size=PAGE,
            slot_ids=torch.arange(8),
            has_slots=True,
            window_map=None,
            sequence=lambda req: self.core.sequence(req.rid),
            grow=lambda req, length: self.core.grow(req.rid, length) is not None,
            trim=lambda req, computed: None,
            available_and_evictable_str=lambda: "",
        )
        self.rows = Rows(6, 32)

    def admit(self, rid: str, tokens: list[int]) -> Any:
        found = self.core.look_up(tuple(tokens))
        assert self.core.admit(rid, found, num_tokens=len(tokens)) is not None
        kv = SimpleNamespace(
            holds_mamba=False,
            holds_kv=False,
            mamba_pool_idx=None,
            kv_allocated_len=0,
            kv_committed_len=0,
        )
        return SimpleNamespace(rid=rid, kv=kv, hit=found.match.length)

    def batch(self, reqs: list[Any], prefixes: list[int], ends: list[int]) -> Any:
        lengths = torch.tensor(ends)
        return SimpleNamespace(
            reqs=reqs,
            device="cpu",
            prefix_lens=prefixes,
            seq_lens_cpu=lengths,
            seq_lens=lengths,
            req_to_token_pool=self.rows,
        )

    def expected(self, rid: str, end: int) -> list[int]:
        pages = self.core.sequence(rid).pages
        return [pages[i // PAGE] * PAGE + i % PAGE for i in range(end)]

    def row(self, req: Any, end: int) -> list[int]:
        return [int(x) for x in self.rows.req_to_token[req.kv.req_pool_idx, :end]]


def test_new_requests_get_rows_and_positions_in_order() -> None:
    bench = Bench()
    a, b = bench.admit("a", list(range(6))), bench.admit("b", list(range(50, 55)))
    added, rows, rows_cpu = token_placement.extend(
        bench.cache, bench.batch([a, b], [0, 0], [6, 5])
    )
    assert added.tolist() == bench.expected("a", 6) + bench.expected("b", 5)
    assert rows.tolist() == rows_cpu.tolist() == [1, 2]
    assert bench.row(a, 6) == bench.expected("a", 6)
    assert bench.row(b, 5) == bench.expected("b", 5)
    assert bench.row(a, 7)[-1] == -7  # nothing behind the end was touched
    assert (a.kv.kv_allocated_len, b.kv.kv_committed_len) == (6, 5)
    assert int(a.kv.mamba_pool_idx) == bench.core.sequence("a").slot


def test_a_second_chunk_adds_to_its_row_alone() -> None:
    bench = Bench()
    a = bench.admit("a", list(range(11)))
    token_placement.extend(bench.cache, bench.batch([a], [0], [7]))
    added, _, _ = token_placement.extend(bench.cache, bench.batch([a], [7], [11]))
    assert added.tolist() == bench.expected("a", 11)[7:]
    assert bench.row(a, 11) == bench.expected("a", 11)
    assert a.kv.req_pool_idx == 1


def test_a_hit_is_written_into_the_new_row() -> None:
    bench = Bench()
    first = bench.admit("first", list(range(9)))
    token_placement.extend(bench.cache, bench.batch([first], [0], [9]))
    bench.core.finish("first", tuple(range(9)), 9)
    again = bench.admit("again", [*range(9), 70, 71])
    assert again.hit == 9  # two whole pages and one token of a third
    added, _, _ = token_placement.extend(bench.cache, bench.batch([again], [9], [11]))
    assert bench.row(again, 11) == bench.expected("again", 11)
    assert added.tolist() == bench.expected("again", 11)[9:]


def test_decoding_goes_on_within_a_page_and_begins_new_ones() -> None:
    bench = Bench()
    a, b = bench.admit("a", list(range(4))), bench.admit("b", list(range(50, 56)))
    token_placement.extend(bench.cache, bench.batch([a, b], [0, 0], [4, 6]))
    lengths = [4, 6]
    for _ in range(9):
        batch = bench.batch([a, b], [], lengths)
        batch.req_pool_indices = torch.tensor([a.kv.req_pool_idx, b.kv.req_pool_idx])
        added = token_placement.decode(bench.cache, batch)
        lengths = [n + 1 for n in lengths]
        assert added.tolist() == [
            bench.expected("a", lengths[0])[-1],
            bench.expected("b", lengths[1])[-1],
        ]
    assert bench.row(a, 13) == bench.expected("a", 13)
    assert bench.row(b, 15) == bench.expected("b", 15)
    assert a.kv.kv_committed_len == 13


def test_no_room_is_an_error_that_says_so() -> None:
    bench = Bench(pages=2)
    a = bench.admit("a", list(range(4)))
    token_placement.extend(bench.cache, bench.batch([a], [0], [4]))
    batch = bench.batch([a], [], [4])
    batch.req_pool_indices = torch.tensor([a.kv.req_pool_idx])
    with pytest.raises(RuntimeError, match="beyond the pages"):
        token_placement.decode(bench.cache, batch)
