# SPDX-License-Identifier: Apache-2.0
"""Rows of a scratch on GPU memory that comes and goes, under captured graphs."""

from __future__ import annotations

import pytest
import torch

from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.memory.elastic_plan import plan_elastic
from hybrid_plugin.core.memory.layout import AttentionGroup, CacheLayout, StateGroup
from hybrid_plugin.core.memory.scratch import ScratchLayout
from hybrid_plugin.device import cuda_arena
from hybrid_plugin.device.arena import ElasticArena
from hybrid_plugin.device.cuda_arena import CudaArena
from hybrid_plugin.device.row_pool import (
    RowTensor,
    apart_bytes,
    place,
    together_bytes,
)

pytestmark = pytest.mark.skipif(
    not cuda_arena.is_available(), reason="needs a GPU and cuda-bindings"
)

BLOCK = 2 << 20
BUDGET = 256 * BLOCK
LAYERS, DRAFTS, ROWS = 3, 4, 6
TENSORS = (
    RowTensor(LAYERS, (DRAFTS, 8, 64, 64), torch.float32, apart=True),
    RowTensor(LAYERS, (256, DRAFTS + 2), torch.bfloat16),
)


def test_graphs_stay_valid_while_rows_come_and_go() -> None:
    device = torch.device("cuda")
    layout = CacheLayout(
        page_size=16,
        attention=(AttentionGroup(("a",), 64 << 10),),
        states=(StateGroup(("s",), 1 << 20),),
        scratch=ScratchLayout(ROWS, apart_bytes(TENSORS), together_bytes(TENSORS)),
    )
    plan = plan_elastic(
        layout, BUDGET, block_bytes=BLOCK, max_model_len=512, max_sequences=ROWS
    )
    scratch, pool = plan.layout.scratch, plan.pools[Pool.SCRATCH]
    assert scratch is not None and scratch.rows == ROWS
    memory = CudaArena(BUDGET + BLOCK, device, BLOCK)
    count = plan.ids(Pool.SCRATCH)
    addresses = memory.reserve(count * scratch.row_bytes)
    placed, parts = place(addresses.memory, count, scratch.together, TENSORS)
    rows = ElasticArena(parts, addresses, memory, pool.per_granule)
    granules = range(count // pool.per_granule)
    assert rows.map(granules) is None

    def verify(batch: int) -> None:
        for tensor in placed:
            tensor[:, :batch] += 1

    graphs = {}
    for batch in (1, ROWS):
        verify(batch)
        graphs[batch] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[batch]):
            verify(batch)
    for tensor in placed:
        tensor[:, :ROWS].zero_()
    for _ in range(3):
        rows.unmap(granules[1:])
        graphs[1].replay()
        assert rows.map(granules[1:]) is None
        graphs[ROWS].replay()
    torch.cuda.synchronize()
    others = slice(pool.per_granule, ROWS)
    for tensor in placed:
        assert bool((tensor[:, 0] == 6).all())
        assert bool((tensor[:, others] == 1).all()), "a row comes back cleared"
    assert scratch.rows > pool.per_granule, "some rows came and went"
    memory.close()
