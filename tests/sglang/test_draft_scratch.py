# SPDX-License-Identifier: Apache-2.0
"""States are taken from SGLang's scratch by the path that was accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.memory_pool import MambaPool

from hybrid_plugin.core.commands import Pool, Take
from hybrid_plugin.device.row_pool import apart_bytes, place, together_bytes
from hybrid_plugin.sglang.slots import SlotMajorPool, slot_bytes
from hybrid_plugin.sglang.speculation.scratch import (
    DraftScratch,
    rows_bytes,
    scratch_tensors,
)
from hybrid_plugin.sglang.speculation.scratch_layout import moved, row_tensors

WIDTH, ROWS, SLOTS = 4, 3, 6


def parameters() -> Any:
    """Of two small Mamba-2 layers."""
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=16,
        n_groups=1,
        num_heads=2,
        head_dim=8,
        state_size=4,
        conv_kernel=4,
    )
    return Mamba2CacheParams(shape=shape, layers=[0, 2])


def pool(topk: int, drafts: int | None = WIDTH) -> MambaPool:
    """SGLang's own, filled with numbers that differ."""
    built = MambaPool(
        size=SLOTS,
        spec_state_size=ROWS,
        cache_params=parameters(),
        mamba_layer_ids=[0, 2],
        device="cpu",
        speculative_num_draft_tokens=drafts,
        speculative_eagle_topk=topk,
    )
    kept = built.mamba_cache
    torch.manual_seed(0)
    for tensor in (kept.temporal, *kept.conv, *built_scratch(built)):
        tensor.copy_(torch.randn(tensor.shape))
    return built


def built_scratch(built: MambaPool) -> list[torch.Tensor]:
    """Memory of the scratch: of a chain the windows of a row overlap."""
    if getattr(built.mamba_cache, "intermediate_ssm", None) is None:
        return []
    return [built.mamba_cache.intermediate_ssm, *built._intermediate_conv_window_phys]


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_a_state_is_that_after_the_last_accepted_draft(topk: int) -> None:
    kept = pool(topk).mamba_cache
    scratch = DraftScratch(kept)
    # Rows accept nothing, drafts 1 and 3, and draft 2.
    path = [[0, -1, -1], [4, 5, 7], [8, 10, -1]]
    scratch.note_path(torch.tensor(path, dtype=torch.int32), WIDTH)
    others = kept.temporal[:, [0, 1, 4]].clone()
    scratch.take(
        [
            Take(Pool.STATE, 1, 2, 5),
            Take(Pool.STATE, 0, 0, 3),
            Take(Pool.STATE, 2, 1, 2),
        ]
    )
    pairs = [(kept.intermediate_ssm, kept.temporal)]
    pairs += zip(kept.intermediate_conv_window, kept.conv, strict=True)
    for written, states in pairs:
        for row, draft, slot in ((1, 3, 5), (0, 0, 3), (2, 2, 2)):
            assert torch.equal(states[:, slot].float(), written[:, row, draft].float())
    assert torch.equal(kept.temporal[:, [0, 1, 4]], others)


def test_nothing_is_taken_before_something_was_verified() -> None:
    scratch = DraftScratch(pool(1).mamba_cache)
    with pytest.raises(RuntimeError, match="nobody wrote"):
        scratch.take([Take(Pool.STATE, 0, 0, 1)])


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_what_is_charged_is_no_less_than_what_is_taken(topk: int) -> None:
    built = pool(topk)
    taken = sum(t.numel() * t.itemsize for t in built_scratch(built))
    charged = rows_bytes(parameters(), ROWS, WIDTH)
    assert taken <= charged
    assert topk == 1 or taken == charged
    assert len(scratch_tensors(built.mamba_cache)) == 2


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_a_scratch_on_memory_that_moves_has_sglang_s_tensors(topk: int) -> None:
    """The same shapes and the same overlap, in fewer bytes behind each other."""
    stock, count = pool(topk), 8
    tensors = row_tensors(parameters(), WIDTH, topk)
    stride = together_bytes(tensors) + 128
    memory = torch.zeros(count * (sum(apart_bytes(tensors)) + stride), dtype=torch.int8)
    placed, _ = place(memory, count, stride, tensors)
    made = SlotMajorPool(
        torch.zeros(SLOTS + 1, slot_bytes(parameters()), dtype=torch.int8),
        placed,
        size=SLOTS,
        spec_state_size=ROWS,
        cache_params=parameters(),
        mamba_layer_ids=[0, 2],
        device="cpu",
        speculative_num_draft_tokens=WIDTH,
        speculative_eagle_topk=topk,
    )
    own, theirs = made.mamba_cache, stock.mamba_cache
    assert isinstance(own, MambaPool.SpeculativeState)
    pairs = [(own.intermediate_ssm, theirs.intermediate_ssm)]
    pairs += zip(
        own.intermediate_conv_window, theirs.intermediate_conv_window, strict=True
    )
    for ours, stocks in pairs:
        assert ours.shape[0] == stocks.shape[0] and ours.shape[1] == count
        assert ours.shape[2:] == stocks.shape[2:]
        assert ours.stride()[2:] == stocks.stride()[2:]
        for row in range(ROWS):  # tokens in order, as a kernel writes them
            for draft in range(WIDTH):
                ours[:, row, draft] = stocks[:, row, draft]
        assert torch.equal(ours[:, :ROWS], stocks[:, :ROWS])
    assert own.intermediate_ssm.is_contiguous()


def test_a_scratch_of_other_tensors_is_refused() -> None:
    tensors = row_tensors(parameters(), WIDTH + 1, 1)
    placed = [torch.zeros(t.layers, 4, *t.shape, dtype=t.dtype) for t in tensors]
    with pytest.raises(ValueError, match="were planned as"):
        moved(pool(2).mamba_cache, built_scratch(pool(2))[1:], placed)


def test_without_drafts_there_is_no_scratch() -> None:
    assert scratch_tensors(pool(1, drafts=None).mamba_cache) == []
