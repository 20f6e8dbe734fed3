# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch
from hybrid_kernels import state_copy

STRIDE = 100 * 2**20
"""Bytes between slots: 25 slots pass 2**31 bytes."""


def test_slots_a_hundred_megabytes_apart() -> None:
    room = torch.empty(25 * STRIDE, dtype=torch.uint8, device="cuda")
    pool = room.as_strided((25, 3 * 2**20), (STRIDE, 1))
    pool.random_(0, 255)
    before = pool.clone()
    state_copy.fork(
        pool,
        torch.tensor([24, 23], device="cuda"),
        torch.tensor([22, 1], device="cuda"),
    )
    state_copy.zero(pool, torch.tensor([21, -1], device="cuda"))
    before[22], before[1], before[21] = before[24], before[23], 0
    assert torch.equal(pool, before)


def test_layer_major_slots_far_apart() -> None:
    room = torch.empty(3, 900 * 2**20, dtype=torch.uint8, device="cuda")
    pool = room.as_strided((3, 9, 2**20), (900 * 2**20, STRIDE, 1))
    pool.random_(0, 255)
    before = pool.clone()
    lists = torch.tensor([[8, 7], [0, 1]], device="cuda")
    state_copy.fork(pool, lists[0], lists[1], slot_dim=1)
    before[:, 0], before[:, 1] = before[:, 8], before[:, 7]
    assert torch.equal(pool, before)


def test_captured_graph_reads_new_slot_lists() -> None:
    pool = torch.randn(32, 5000, device="cuda")
    lists = torch.full((2, 4), -1, device="cuda")
    table = torch.full((4, 3), -1, device="cuda")
    accepted = torch.zeros(4, dtype=torch.int32, device="cuda")

    def work() -> None:
        state_copy.fork(pool, lists[0], lists[1])
        state_copy.promote(pool, table, accepted)
        state_copy.zero(pool, lists[0])

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    lists.copy_(torch.tensor([[1, 2, -1, 3], [4, 5, 6, -1]]))
    table[0] = torch.tensor([10, 11, 12])
    accepted[0] = 2
    expected = pool.clone()
    expected[4], expected[5], expected[10] = pool[1], pool[2], pool[12]
    expected[1:4] = 0
    graph.replay()
    assert torch.equal(pool, expected)
