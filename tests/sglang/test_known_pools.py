# SPDX-License-Identifier: Apache-2.0
"""Pools that keep more than the plugin copies are refused, by what is in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool
from sglang.srt.runtime_context import get_context, get_parallel

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.commands import Copy, Pool, Zero
from hybrid_plugin.device.rows import rows_of
from hybrid_plugin.sglang import (
    compressed_keys,
    index_keys,
    known_pools,
    planning,
    side_states,
)
from hybrid_plugin.sglang.pending_keys import PendingKeys
from hybrid_plugin.sglang.pool_memory import PoolMemory
from hybrid_plugin.sglang.pool_rows import index_tensors
from hybrid_plugin.sglang.rings import Rings
from hybrid_plugin.sglang.speculation.replay.passes import Replay
from hybrid_plugin.sglang.speculation.scratch import scratch_tensors

ATTENTION = {
    "size": 64,
    "dtype": torch.bfloat16,
    "page_size": 16,
    "head_num": 2,
    "head_dim": 8,
    "full_attention_layer_ids": [1, 3],
    "device": "cpu",
}
COMPRESSED = {
    "qsa_index_kv_heads": 1,
    "qsa_index_head_dim": 8,
    "qsa_compress_ratio": 4,
    "qsa_token_topk": 16,
    "num_request_slots": 5,
}
SHORT_CONVOLUTION = {
    "short_conv_layer_ids": [0],
    "short_conv_state_shape": (8, 3),
    "ngram_context_len": 2,
}


def states(**more: Any) -> Any:
    """SGLang's slots of two state layers."""
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=64,
        n_groups=1,
        num_heads=4,
        head_dim=16,
        state_size=8,
        conv_kernel=4,
    )
    return HybridReqToTokenPool(
        size=40,
        mamba_size=6,
        mamba_spec_state_size=4,
        max_context_len=64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0, 2]),
        mamba_layer_ids=[0, 2],
        enable_mamba_extra_buffer=False,
        **more,
    )


INDEXED = {
    "use_mla": True,
    "use_dsa": True,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 0,
    "kv_cache_dim": 16,
    "index_head_dim": 128,
    "index_kpool": 4,
    "index_kpool_compress": True,
    "max_running_requests": 5,
    "skip_topk_layers": [False, True],
    "size": 512,
    "page_size": 256,
}


def indexed_pool(slots: Any, **more: Any) -> Any:
    """SGLang's pool of two attention layers, of which the first has index keys."""
    with get_parallel().override(attn_dcp_size=1):
        return HybridLinearKVPool(
            mamba_pool=slots.mamba_pool, **(ATTENTION | INDEXED | more)
        )


def check(kv_pool: Any, slots: Any) -> None:
    """As `take_over` does."""
    stock = SimpleNamespace(get_kvcache=lambda: kv_pool)
    known_pools.require(kv_pool, slots, planning._copied(stock, slots))


@pytest.mark.parametrize(
    "more", [{}, {"use_mla": True, "kv_lora_rank": 16, "qk_rope_head_dim": 8}]
)
def test_what_commands_copy_is_all_there_is(more: dict[str, Any]) -> None:
    slots = states()
    check(HybridLinearKVPool(mamba_pool=slots.mamba_pool, **ATTENTION, **more), slots)


def test_index_keys_and_their_rings_are_copied() -> None:
    """GLM-5.3-Flash's, of four tokens each, in one of two attention layers."""
    slots = states()
    pool = indexed_pool(slots)
    rings = Rings()
    rows = rings.give_to_slots(pool.full_kv_pool, slots)
    check(pool, slots)
    assert [tuple(one.shape) for one in rows] == [(7, 4 * 128 * 2)] * 2
    ring, scores = pool.get_compress_tail_buffers(1)
    assert len(ring) == len(scores) == 7
    ring[3] = 1
    executor = PoolMemory().executor(pool, slots.mamba_pool, 256, rings=rows)
    kept = pool.full_kv_pool.index_key_cache.buffer[0]
    kept[1], kept[2] = 5, 0
    executor.run([Copy(Pool.STATE, 3, 2), Copy(Pool.KV, 1, 2)])
    assert torch.equal(ring[2], ring[3])
    assert torch.equal(kept[2], kept[1])


def indexed_model(architecture: str = "Glm5NextForConditionalGeneration") -> Any:
    """As much of SGLang's `ModelConfig` as says what index keys there are."""
    config = SimpleNamespace(
        architectures=[architecture],
        index_topk=64,
        index_kpool=4,
        index_kpool_compress=True,
        index_head_dim=128,
        index_topk_pattern="FFFS",
    )
    return SimpleNamespace(hf_config=config)


@pytest.mark.parametrize("drafts", [0, 6])
def test_a_layout_has_as_many_bytes_as_the_pools(
    drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory is planned by the layout, and copied by the pools."""
    slots, model = states(), indexed_model()
    params = SimpleNamespace(full_attention_layer_ids=[1, 3])
    pool = indexed_pool(slots, tail_extra_slots=drafts)
    rows = Rings().give_to_slots(pool.full_kv_pool, slots)
    monkeypatch.setattr(index_keys, "mambaish_config", lambda model: params)
    keys = index_keys.page_group(model, 256)
    ring = index_keys.ring_group(model, drafts)
    assert keys is not None and ring is not None
    (found,) = index_tensors(pool.full_kv_pool)
    assert len(keys.layers) == 1 and keys.page_bytes == found.shape[1]
    assert len(ring.layers) == 1 and ring.state_bytes == sum(r.shape[1] for r in rows)


def test_slots_carry_the_rings_of_a_draft_model() -> None:
    """The head of a GLM-5.3-Flash has index keys of its own."""
    slots, memory = states(), PoolMemory()
    target = indexed_pool(slots, tail_extra_slots=6)
    rings = memory.rings.give_to_slots(target.full_kv_pool, slots)
    executor = memory.executor(target, slots.mamba_pool, 256, rings=rings)
    before = {pool: len(parts) for pool, parts in executor.parts().items()}
    one_layer = {"full_attention_layer_ids": [0], "skip_topk_layers": None}
    draft = indexed_pool(slots, tail_extra_slots=6, **one_layer)
    pools = SimpleNamespace(token_to_kv_pool=draft, req_to_token_pool=slots)
    with get_context().override_server_args(page_size=256):
        planning.share_draft_pages(pools, torch.nn.Linear(1, 1), slots, memory)
    added = {
        pool: sum(part.shape[1] for part in parts[before[pool] :])
        for pool, parts in executor.parts().items()
    }
    head = indexed_model("Glm5NextForConditionalGenerationNextN")
    kept = index_keys.keys_of_draft(head, 1, 256, 6)
    assert kept is not None and kept.rings is not None
    assert added[Pool.STATE] == kept.rings.state_bytes
    latents = 256 * INDEXED["kv_lora_rank"] * 2
    assert added[Pool.KV] == kept.keys.page_bytes + latents
    ring, scores = draft.get_compress_tail_buffers(0)
    own = target.get_compress_tail_buffers(1)[0]
    ring[3], scores[3], own[3] = 1, 2, 3
    keys = draft.full_kv_pool.index_key_cache.buffer[0]
    keys[1] = 5
    executor.run([Copy(Pool.STATE, 3, 2), Copy(Pool.KV, 1, 2)])
    for part in (ring, scores, own):
        assert torch.equal(part[2], part[3])
    assert torch.equal(keys[2], keys[1])


def compressed_pool(slots: Any) -> Any:
    """Qwen4-Exp's: keys of several tokens, and a ring of those that wait."""
    return QSATokenToKVPool(mamba_pool=slots.mamba_pool, **ATTENTION, **COMPRESSED)


def test_compressed_keys_and_what_waits_for_one_are_copied() -> None:
    slots = states()
    pool = compressed_pool(slots)
    rows = PendingKeys().give_to_slots(pool, slots)
    check(pool, slots)
    item = pool.index_state_dtype.itemsize
    sizes = [4 * 8 * item, 4 * 8 * item, 4 * 3 * 8]
    assert [tuple(one.shape) for one in rows] == [(7, size) for size in sizes]
    executor = PoolMemory().executor(pool, slots.mamba_pool, 16, rings=rows)
    (keys, _) = pool.qsa_compressed_k_buffer_pool
    keys[4:8], keys[8:12] = 5, 0
    pool.qsa_key_state_buffer_pool[1][12:16] = 3
    pool.qsa_rope_position_buffer[12:16] = 9
    executor.run([Copy(Pool.STATE, 3, 2), Copy(Pool.KV, 1, 2)])
    assert (keys[8:12] == 5).all() and not keys[12:].any()
    assert (pool.qsa_key_state_buffer_pool[1][8:12] == 3).all()
    assert (pool.qsa_rope_position_buffer[8:12] == 9).all()


def test_what_is_known_no_more_is_refused() -> None:
    slots = states()
    pool = compressed_pool(slots)
    pool.summaries = torch.zeros(5, 8)
    with pytest.raises(ConfigError, match="it cannot serve this: SGLang keeps more"):
        check(pool, slots)


def test_a_layout_has_as_many_bytes_as_pools_with_compressed_keys() -> None:
    slots = states(**SHORT_CONVOLUTION)
    pool = compressed_pool(slots)
    rows = PendingKeys().give_to_slots(pool, slots)
    side_states.begin_with_zeros(slots)
    config = SimpleNamespace(
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_compress_ratio=4,
        indexer_budget=2048,
    )
    hybrid = SimpleNamespace(
        full_attention_layer_ids=[1, 3],
        short_conv_layer_ids=[0],
        short_conv_state_shape=(8, 3),
        ngram_context_len=2,
        mamba2_cache_params=SimpleNamespace(
            dtype=SimpleNamespace(conv=slots.short_conv_pool.conv_state.dtype)
        ),
    )
    model: Any = SimpleNamespace(hf_config=config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressed_keys, "mambaish_config", lambda model: hybrid)
        patch.setattr(
            compressed_keys,
            "get_model",
            lambda: SimpleNamespace(qsa_indexer_dtype="auto"),
        )
        keys = compressed_keys.page_group(model, 16)
        groups = (*compressed_keys.ring_groups(model), *side_states.groups(hybrid))
    assert keys is not None
    (one, other) = map(rows_of, compressed_keys.key_tensors(pool))
    assert len(keys.layers) == 2
    assert keys.page_bytes == one.shape[1] == other.shape[1]
    beside = [rows_of(one) for part in side_states.tensors(slots) for one in part]
    found = [row.shape[1] for row in (*rows, *beside)]
    planned = [group.state_bytes for group in groups for _ in group.layers]
    assert planned == found


def test_states_beside_the_slots_are_copied_and_begin_with_zeros() -> None:
    slots = states(**SHORT_CONVOLUTION, ngram_eos_token_id=7)
    pool = HybridLinearKVPool(mamba_pool=slots.mamba_pool, **ATTENTION)
    with pytest.raises(ConfigError, match="context"):
        check(pool, slots)
    side_states.begin_with_zeros(slots)
    check(pool, slots)
    executor = PoolMemory().executor(pool, slots.mamba_pool, 16)
    two, three = torch.tensor([2]), torch.tensor([3])
    slots.set_ngram_context(three, torch.tensor([[5, 6]]))
    slots.short_conv_layer_cache(0)[3] = 1
    executor.run([Copy(Pool.STATE, 3, 2)])
    assert slots.get_ngram_context(two).tolist() == [[5, 6]]
    assert (slots.short_conv_layer_cache(0)[2] == 1).all()
    executor.run([Zero(Pool.STATE, 3)])
    assert slots.get_ngram_context(three).tolist() == [[7, 7]]
    assert not slots.short_conv_layer_cache(0)[3].any()


def test_drafts_have_a_scratch_and_may_have_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = states(speculative_num_draft_tokens=4)
    target = HybridLinearKVPool(mamba_pool=slots.mamba_pool, **ATTENTION)
    stock = SimpleNamespace(get_kvcache=lambda: target)
    known = planning._copied(stock, slots)
    assert list(known_pools.unknown_tensors((target, slots), known))
    scratch = scratch_tensors(slots.mamba_pool.mamba_cache)
    known_pools.require(target, slots, [*known, *scratch])

    draft = HybridLinearKVPool(mamba_pool=slots.mamba_pool, **ATTENTION)
    joined: list[list[torch.Tensor]] = []
    memory: Any = SimpleNamespace(
        join=lambda *rows: joined.extend(rows),
        shared=None,
        drafts=[],
        rings=Rings(),
    )
    pools = SimpleNamespace(token_to_kv_pool=draft, req_to_token_pool=slots)
    model = torch.nn.Linear(1, 1)
    with get_context().override_server_args(page_size=16):
        planning.share_draft_pages(pools, model, slots, memory)
        assert [len(rows) for rows in joined[0]] == [64 // 16 + 1] * 4
        assert joined[1] == []
        draft.full_kv_pool.summaries = torch.zeros(5, 8)
        with pytest.raises(ConfigError, match="summaries"):
            planning.share_draft_pages(pools, model, slots, memory)
        found = ["RadixLinearAttention"]
        monkeypatch.setattr(planning, "draft_state_layer_classes", lambda _: found)
        with pytest.raises(ConfigError, match="states of their own are not supported"):
            planning.share_draft_pages(pools, model, slots, memory)


def test_a_tensor_that_a_later_version_adds() -> None:
    slots = states()
    pool = HybridLinearKVPool(mamba_pool=slots.mamba_pool, **ATTENTION)
    pool.full_kv_pool.summaries = {"of_pages": [torch.zeros(5, 8)]}
    with pytest.raises(ConfigError, match=r"full_kv_pool\.summaries\.of_pages\.0"):
        check(pool, slots)


def test_nothing_is_built_on_such_pools() -> None:
    """The check comes before anything of the plugin's is put in place."""
    slots = states()
    pool = compressed_pool(slots)
    pool.summaries = torch.zeros(5, 8)
    stock = SimpleNamespace(get_kvcache=lambda: pool)
    own = slots.mamba_allocator
    pools: Any = SimpleNamespace(
        token_to_kv_pool_allocator=stock, req_to_token_pool=slots
    )
    with pytest.raises(ConfigError, match="SGLang keeps more"):
        planning.take_over(pools, HybridConfig(), PoolMemory(), None, Replay())
    assert slots.mamba_allocator is own


@pytest.mark.parametrize(
    ("config", "is_windowed", "found"),
    [
        ({}, False, None),
        ({}, True, "a pool for windows beside its states"),
    ],
    ids=["KV and states", "windows"],
)
def test_it_is_known_before_weights_are_loaded(
    config: dict[str, int],
    is_windowed: bool,
    found: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_pools, "mambaish_config", lambda model: object())
    hf_config = SimpleNamespace(architectures=["SomeModel"], **config)
    model: Any = SimpleNamespace(hf_config=hf_config, is_hybrid_swa=is_windowed)
    sentence = known_pools.side_memory(model)
    assert (sentence is None) == (found is None)
    if found is not None:
        assert sentence is not None and found in sentence
