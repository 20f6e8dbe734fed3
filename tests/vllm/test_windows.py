# SPDX-License-Identifier: Apache-2.0
"""Window groups as vLLM sees them: groups, pools, block tables; without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.utils import add_kv_sharing_layers_to_kv_cache_groups

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.commands import Copy, Pool, PoolId
from hybrid_plugin.core.memory.attention_windows import ChunkedLocal, SlidingWindow
from hybrid_plugin.core.memory.layout import PoolSizes
from hybrid_plugin.vllm.activation import is_candidate, mixes_windows
from hybrid_plugin.vllm.manager import HybridKVCacheManager
from hybrid_plugin.vllm.planning import (
    HybridKVCacheConfig,
    capacity,
    make_config,
    make_groups,
    make_layout,
    pools_of,
)
from hybrid_plugin.vllm.pool_memory import PoolMemory

PAGE = 16
SHAPE: dict[str, Any] = {
    "block_size": PAGE,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**SHAPE)
NEAR = SlidingWindowSpec(**SHAPE, sliding_window=32)
FAR = SlidingWindowSpec(**SHAPE, sliding_window=64)
CHUNKS = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=48)
STATE = MambaSpec(block_size=1024, shapes=((2, 16),), dtypes=(torch.float32,))
MIXED: dict[str, KVCacheSpec] = {
    "w0": NEAR,
    "f0": FULL,
    "s0": STATE,
    "w1": NEAR,
    "c0": CHUNKS,
}
PAGE_BYTES = PAGE * 2 * 8 * 2 * 4


def vllm_config(max_model_len: int = 256, chunk: int = 64) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(prefix_cache_retention_interval=None),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=chunk),
        additional_config={"hybrid_plugin": {}},
    )


def config_of(
    specs: dict[str, KVCacheSpec], sizes: PoolSizes | None = None
) -> HybridKVCacheConfig:
    groups = make_groups(specs)
    windows = make_layout(groups).attention_windows
    sizes = sizes or PoolSizes(64, 6, tuple(40 for _ in windows))
    return make_config(vllm_config(), groups, sizes)


def views(
    config: HybridKVCacheConfig, memory: PoolMemory | None = None
) -> dict[str, torch.Tensor]:
    memory = memory or PoolMemory()
    return memory.allocate(config, torch.device("cpu"), KVCacheLayout.LBHNC)


# ------------------------------------------------------------------- planning


def test_each_window_makes_a_group_and_a_pool() -> None:
    groups = make_groups(MIXED | {"w2": FAR})
    assert [g.layer_names for g in groups] == [
        ["f0"],
        ["w0", "w1"],
        ["c0"],
        ["w2"],
        ["s0"],
    ]
    layout = make_layout(groups)
    assert layout.attention_windows == (
        SlidingWindow(32),
        ChunkedLocal(48),
        SlidingWindow(64),
    )
    assert layout.window_page_bytes == (2 * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)
    expected: list[PoolId] = [Pool.KV, *(Pool.window(i) for i in range(3)), Pool.STATE]
    assert pools_of(groups) == expected


def test_layers_with_one_window_share_its_pool_whatever_their_heads() -> None:
    wide = SlidingWindowSpec(**(SHAPE | {"num_kv_heads": 4}), sliding_window=32)
    groups = make_groups({"f0": FULL, "w0": NEAR, "w1": wide})
    assert pools_of(groups) == [Pool.KV, Pool.window(0), Pool.window(0)]
    near, far = config_of({"f0": FULL, "w0": NEAR, "w1": wide}).kv_cache_tensors[1:]
    assert (near.offset, far.offset) == (0, 40 * PAGE_BYTES)
    assert near.size == far.size == 40 * 3 * PAGE_BYTES


def test_num_blocks_is_the_smallest_pool_that_there_is() -> None:
    assert config_of(MIXED, PoolSizes(64, 6, (40, 30))).num_blocks == 6
    assert config_of({"f0": FULL, "w0": NEAR}, PoolSizes(64, 2, (40,))).num_blocks == 40
    # Pages that no layer has are but numbers.
    assert config_of({"w0": NEAR, "s0": STATE}, PoolSizes(5, 9, (40,))).num_blocks == 9


def test_capacity_counts_the_pool_that_fills_first() -> None:
    config = config_of({"f0": FULL, "w0": NEAR}, PoolSizes(65, 2, (7,)))
    tokens, sequences = capacity(vllm_config(), config)
    assert (tokens, sequences) == (64 * PAGE, 2.0)  # 3 pages of the window for each


def test_chunks_end_with_a_page() -> None:
    uneven = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=40)
    with pytest.raises(ConfigError, match="do not fill chunks of 40"):
        make_groups({"f0": FULL, "c0": uneven})


def test_windows_that_hold_more_than_kv_are_refused() -> None:
    latent = SHAPE | {"num_kv_heads": 1, "sliding_window": 32}
    assert make_groups({"w0": SlidingWindowMLASpec(**latent)})
    for more in ({"bounded_replay": True}, {"model_version": "deepseek_v4"}):
        with pytest.raises(ConfigError, match="cannot serve layer w0"):
            make_groups({"w0": SlidingWindowMLASpec(**latent, **more)})


def test_the_builder_gives_every_pool_as_many_ids() -> None:
    pytest.importorskip("vllm.v1.core.kv_cache_config_builder", reason="not in 0.32")
    from hybrid_plugin.vllm.builder import HybridConfigBuilder

    builder = HybridConfigBuilder()
    groups = builder.get_kv_cache_groups(vllm_config(), MIXED)
    config = builder.get_kv_cache_config_from_groups(vllm_config(), groups, 4)
    assert isinstance(config, HybridKVCacheConfig)
    assert (config.pages, config.slots, config.windows) == (4, 4, (4, 4))


# --------------------------------------------------------------------- memory


def test_commands_reach_the_layers_of_their_window_only() -> None:
    memory = PoolMemory()
    layers = views(config_of(MIXED), memory)
    for value, layer in enumerate(layers.values(), start=1):
        layer[2] = value
    memory.executor.run([Copy(Pool.window(0), 2, 5)])
    for value, (name, layer) in enumerate(layers.items(), start=1):
        assert (layer[5] == (value if name in ("w0", "w1") else 0)).all()
    assert (layers["w0"][2] != 0).all()


def test_pages_that_are_numbers_alone_can_be_copied() -> None:
    memory = PoolMemory()
    views(config_of({"w0": NEAR, "s0": STATE}), memory)
    memory.executor.run([Copy(Pool.KV, 1, 2), Copy(Pool.KV, 1, 3)])


def test_layers_that_vllm_adds_to_a_group_own_no_memory() -> None:
    """It adds those that read another layer's KV before it allocates."""
    config = config_of({"f0": FULL, "w0": NEAR, "s0": STATE})
    planned = config.plan
    readers = {"reads w0": "w0", "reads f0": "f0", "reads it too": "f0"}
    add_kv_sharing_layers_to_kv_cache_groups(readers, config.kv_cache_groups)
    assert config.kv_cache_groups[0].layer_names == ["f0", "reads f0", "reads it too"]
    assert config.plan == planned, "rows in files and on other servers are that long"
    assert set(views(config)) == {"f0", "w0", "s0"}


# -------------------------------------------------------------------- manager


def manager_of(config: HybridKVCacheConfig) -> HybridKVCacheManager:
    return HybridKVCacheManager(config, HybridConfig(), watermark=0.0, log_stats=False)


def request(name: str, tokens: list[int], computed: int = 0) -> Any:
    return SimpleNamespace(
        request_id=name,
        all_token_ids=tokens,
        num_tokens=len(tokens),
        num_computed_tokens=computed,
        num_preemptions=0,
        skip_reading_prefix_cache=False,
        sampling_params=None,
        lora_request=None,
        cache_salt=None,
        mm_features=[],
        prompt_embeds=None,
        is_finished=lambda: True,
    )


def compute(manager: HybridKVCacheManager, one: Any, chunk: int) -> None:
    """Schedule the rest of a request's tokens, so many in a step."""
    while one.num_computed_tokens < one.num_tokens:
        step = min(chunk, one.num_tokens - one.num_computed_tokens)
        if manager.cache.is_live(one.request_id):
            assert manager.allocate_slots(one, step) is not None
        else:
            _, hit, _ = manager.get_computed_blocks(one)
            step = min(chunk, one.num_tokens - hit)
            given = manager.allocate_slots(one, step, num_new_computed_tokens=hit)
            assert given is not None
            one.num_computed_tokens = hit
        one.num_computed_tokens += step
        manager.step_scheduled([one])


def decode(manager: HybridKVCacheManager, one: Any, count: int) -> None:
    for token in range(count):
        one.all_token_ids.append(200 + token)
        one.num_tokens += 1
        compute(manager, one, 1)


def in_use(manager: HybridKVCacheManager) -> list[int]:
    return [group.pages.in_use for group in manager.cache.windows]


def test_pages_leave_their_windows_in_prefill_and_in_decode() -> None:
    manager = manager_of(config_of({"f0": FULL, "w0": NEAR, "c0": CHUNKS}))
    one = request("a", list(range(160)))
    compute(manager, one, 32)
    assert manager.cache.pages.in_use == 10
    assert in_use(manager) == [2, 1]  # tokens 129 on, and 144 on
    for _ in range(10):
        decode(manager, one, 10)
        assert all(count <= 4 for count in in_use(manager))
    full, near, chunks = manager.get_block_ids("a")
    assert len(full) == len(near) == len(chunks) == 17
    assert all(full) and not any(near[:14]) and all(near[14:])
    assert not any(chunks[:15]) and all(chunks[15:])


def test_growth_gives_every_group_its_new_pages() -> None:
    manager = manager_of(config_of(MIXED))
    one = request("a", list(range(100)))
    compute(manager, one, 64)
    one.all_token_ids += range(100, 150)
    one.num_tokens += 50
    fresh = manager.allocate_slots(one, 50)
    assert fresh is not None
    new = fresh.get_block_ids()
    whole = manager.get_block_ids("a")
    assert [len(ids) for ids in new] == [3, 3, 3, 0]
    assert all(ids[-3:] == more for ids, more in zip(whole[:3], new[:3], strict=True))
    assert whole[3] == [manager.cache.sequence("a").slot]


def test_a_hit_shows_what_left_the_window_as_the_null_block() -> None:
    manager = manager_of(config_of({"f0": FULL, "w0": NEAR}))
    first = request("a", list(range(100)))
    compute(manager, first, 50)
    manager.free(first)
    second = request("b", list(range(130)))
    blocks, hit, _ = manager.get_computed_blocks(second)
    assert hit == 100
    assert [len(ids) for ids in blocks.get_block_ids()] == [6, 0]
    assert manager.allocate_slots(second, 30, num_new_computed_tokens=hit) is not None
    full, near = manager.get_block_ids("b")
    assert near[:4] == [0, 0, 0, 0] and all(near[4:])  # tokens 69 on
    assert len(near) == len(full) == 9
    copies = [c.pool for c in manager.drain_commands() if isinstance(c, Copy)]
    assert copies == [Pool.KV, Pool.window(0)]


def test_a_full_window_pool_refuses_and_counts_as_usage() -> None:
    manager = manager_of(config_of({"f0": FULL, "w0": NEAR}, PoolSizes(64, 2, (5,))))
    compute(manager, request("a", list(range(60))), 60)
    assert manager.usage == 3 / 4  # tokens 29 on
    other = request("b", list(range(100, 160)))
    manager.get_computed_blocks(other)
    assert manager.allocate_slots(other, 60) is None


def test_a_model_without_states_needs_no_slots() -> None:
    manager = manager_of(config_of({"f0": FULL, "w0": NEAR}, PoolSizes(64, 2, (40,))))
    for name in "abc":
        compute(manager, request(name, [ord(name)] * 40), 40)
    assert not manager.cache.slots.needed
    assert len(manager.get_block_ids("c")) == 2


# ----------------------------------------------------------------- activation

SLIDING = {"layer_types": ["full_attention", "sliding_attention"]}
CHUNKED = {"layer_types": ["chunked_attention", "full_attention"]}


def model_of(is_hybrid: bool = False, **fields: Any) -> Any:
    text = SimpleNamespace(**fields)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            is_hybrid=is_hybrid, is_attention_free=False, hf_text_config=text
        )
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (SLIDING | {"sliding_window": 128}, True),
        (CHUNKED | {"attention_chunk_size": 8192}, True),
        (SLIDING, False),
        (SLIDING | {"sliding_window": None, "attention_chunk_size": 64}, False),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 128}, False),
        ({"layer_types": ["full_attention"], "sliding_window": 128}, False),
        ({"layer_types": [*SLIDING["layer_types"], "x"], "sliding_window": 8}, False),
        ({"layer_types": None, "sliding_window": 4096}, False),
        ({"sliding_window": 4096}, False),
    ],
)
def test_models_that_mix_windows_are_known_by_their_layer_types(
    fields: dict[str, Any], expected: bool
) -> None:
    assert mixes_windows(model_of(**fields)) == expected


def test_windows_without_states_are_served_on_request_only() -> None:
    windows = model_of(**SLIDING, sliding_window=128)
    assert is_candidate(windows, HybridConfig(enabled=True))
    assert not is_candidate(windows, HybridConfig())
    assert not is_candidate(model_of(), HybridConfig(enabled=True))
    assert is_candidate(model_of(is_hybrid=True), HybridConfig())
