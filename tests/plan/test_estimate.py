# SPDX-License-Identifier: Apache-2.0
"""How much fits, by hand, for each scheme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_kernels.replay import record_size

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.tiers.host_plan import plan_host, rows_of
from hybrid_plugin.tools.plan.estimate import (
    group_size,
    host_memory,
    sglang_static,
    two_pools,
    vllm_aligned,
)
from hybrid_plugin.tools.plan.model import load_shape
from hybrid_plugin.tools.plan.shape import ModelShape
from tests.plan.configs import (
    CODESTRAL_MAMBA,
    GEMMA3,
    LLAMA,
    NEMOTRON_H,
    QWEN3_NEXT,
    write,
)

GIB = 2**30


@pytest.fixture
def next_shape(tmp_path: Path) -> ModelShape:
    return load_shape(write(tmp_path, QWEN3_NEXT))


def test_two_pools(next_shape: ModelShape) -> None:
    page, slot = 16 * 24_576, 36 * 1_097_728
    estimate = two_pools(next_shape, 8 * GIB, 4096, 16)
    assert slot % 256 == 0
    count = (8 * GIB - page - slot) // (256 * page + slot)
    assert (estimate.running, estimate.cached_sequences) == (count, count) == (60, 60)
    assert (estimate.cached_tokens, estimate.unit) == (60 * 4096, 16)


def test_vllm_aligned(next_shape: ModelShape) -> None:
    """The block that vLLM 0.32 logs for this model: 544 tokens."""
    estimate = vllm_aligned(next_shape, 8 * GIB, 4096)
    assert estimate.unit == 544
    blocks = 8 * GIB // (12 * 544 * 2048) - 1
    assert blocks == 641
    assert estimate.running == blocks // (8 + 2 * 3)
    assert estimate.cached_sequences == blocks // (7 + 3)
    assert estimate.cached_tokens == 64 * 7 * 544


def test_vllm_caches_nothing_shorter_than_a_block(next_shape: ModelShape) -> None:
    estimate = vllm_aligned(next_shape, 8 * GIB, 500)
    assert (estimate.cached_sequences, estimate.cached_tokens) == (0, 0)


def test_sglang_static(next_shape: ModelShape) -> None:
    estimate = sglang_static(next_shape, 8 * GIB, 4096, 16)
    slots = int(8 * GIB * 0.9 / 1.9) // (36 * 1_097_728) - 1
    tokens = (8 * GIB - (slots + 1) * 36 * 1_097_728) // 24_576
    assert estimate.running == min(slots // 5, tokens // 4096) == 20
    assert estimate.cached_sequences == min(slots, tokens // 4096) == 45


def test_drafts(next_shape: ModelShape) -> None:
    """Three of them: lent by us, a state each in vLLM, a scratch of rows in SGLang."""
    state = 36 * 1_097_728
    ours = two_pools(next_shape, 8 * GIB, 4096, 16, drafts=3)
    assert ours.running == 60
    usable = 8 * GIB - 16 * 24_576 - state
    at_once = usable // (4096 * 24_576 + 4 * state)
    assert at_once == 33
    assert f"= {at_once} sequences" in ours.steps[-2]
    assert "= 5.64 MiB beside the pools for each" in ours.steps[-1]
    rows = usable // (4096 * 24_576 + 5 * state)
    assert rows == 28 and f"= {rows} sequences" in ours.steps[-3]
    stock = vllm_aligned(next_shape, 8 * GIB, 4096, drafts=3)
    assert stock.running == 641 // (8 + (2 + 3) * 3)
    assert stock.cached_sequences == 641 // (7 + 3)
    left = 8 * GIB - 49 * 4 * state
    slots = int(left * 0.9 / 1.9) // state - 1
    assert sglang_static(next_shape, 8 * GIB, 4096, 16, drafts=3).running == slots // 5
    roomy = sglang_static(next_shape, 200 * GIB, 4096, 16, drafts=3)
    assert roomy.running == 48


def test_records_are_as_large_as_the_kernels_write_them(
    next_shape: ModelShape, tmp_path: Path
) -> None:
    pool = torch.empty((0, 32, 128, 128), device="meta")
    numbers = record_size(pool, 16, wide_decay=False)
    assert next_shape.record_bytes == 36 * (4 * numbers + 2 * 8192)
    mamba2 = load_shape(write(tmp_path, NEMOTRON_H))
    config = NEMOTRON_H
    heads, groups = config["mamba_num_heads"], config["n_groups"]
    width, depth = config["mamba_head_dim"], config["ssm_state_size"]
    pool = torch.empty((0, heads, width, depth), device="meta")
    numbers = record_size(pool, groups, wide_decay=False)
    channels = heads * width + 2 * groups * depth
    (layers,) = mamba2.states
    assert layers.record_bytes == 4 * numbers + 2 * channels


def test_windows_cost_no_more_than_their_reach(tmp_path: Path) -> None:
    shape = load_shape(write(tmp_path, GEMMA3))
    layer = 2 * 16 * 128 * 2
    estimate = two_pools(shape, 80 * GIB, 32_768, 16)
    one = 2048 * 16 * 10 * layer + 64 * 16 * 52 * layer
    page = 16 * 10 * layer
    assert estimate.running == (80 * GIB - page) // one
    dense = sglang_static(shape, 80 * GIB, 32_768, 16)
    assert dense.running == 80 * GIB // (62 * layer) // 32_768


def test_a_dense_model_fits_alike_in_all(tmp_path: Path) -> None:
    shape = load_shape(write(tmp_path, LLAMA))
    estimates = (
        two_pools(shape, 8 * GIB, 4096, 16),
        vllm_aligned(shape, 8 * GIB, 4096),
        sglang_static(shape, 8 * GIB, 4096, 16),
    )
    assert [estimate.running for estimate in estimates] == [15, 15, 16]


def test_layers_are_grouped_by_the_smallest_number_unless_nearly_equal() -> None:
    assert group_size([12, 36]) == 12
    assert group_size([10, 52]) == 10
    assert group_size([10, 14]) == 14


@pytest.mark.parametrize("config", [QWEN3_NEXT, NEMOTRON_H, GEMMA3], ids=str)
def test_host_memory_holds_what_it_says_and_no_more(
    config: dict[str, Any], tmp_path: Path
) -> None:
    shape = load_shape(write(tmp_path, config))
    layout = shape.layout(16)
    found = host_memory(shape, 64 * GIB, 4096, 16)
    plan = plan_host(rows_of(layout), 64 * GIB)
    rows = {Pool.KV: 256}
    if layout.states:
        rows[Pool.STATE] = 1
    for index, window in enumerate(layout.attention_windows):
        rows[Pool.window(index)] = layout.live_pages(window, 4096)
    broker = plan.build(layout.attention_windows).broker
    assert set(rows) == set(plan.row_bytes) and broker.moves_memory

    def blocks(sequences: int) -> int:
        return sum(
            -(-(1 + sequences * count) // plan.rows_per_block(pool))
            for pool, count in rows.items()
        )

    count = found.cached_sequences
    assert found.cached_tokens == count * 4096 and found.running == 0
    assert blocks(count) <= plan.blocks < blocks(count + 1)


def test_host_memory_that_holds_nothing(next_shape: ModelShape) -> None:
    with pytest.raises(ConfigError, match=r"^--host-memory: .* needs 3\.$"):
        host_memory(next_shape, 1 << 20, 4096, 16)


def test_states_alone_have_all_the_memory(tmp_path: Path) -> None:
    shape = load_shape(write(tmp_path, CODESTRAL_MAMBA))
    slot = shape.state_bytes
    estimate = two_pools(shape, 8 * GIB, 4096, 16)
    assert estimate.scheme == "states alone"
    assert estimate.running == estimate.cached_sequences == 8 * GIB // slot - 1
    assert estimate.steps[0] == (
        "no layer attends: there is no KV, and states have all the memory"
    )
    assert "pages" not in " ".join(estimate.steps)
    longer = two_pools(shape, 8 * GIB, 1 << 20, 16)
    assert longer.running == estimate.running, "a state is as large after any length"
