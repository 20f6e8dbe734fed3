# SPDX-License-Identifier: Apache-2.0
"""Rings of tokens without an index key: parts of slots, as vLLM's own code has them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.models.qwen4_exp.common import qsa_cache
from vllm.v1.attention.ops import metadata as token_metadata
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.commands import Copy, Map, Pool, Zero
from hybrid_plugin.core.memory.elastic_plan import plan_elastic
from hybrid_plugin.core.memory.layout import PoolSizes
from hybrid_plugin.device import host_arena
from hybrid_plugin.device.host_arena import HostArena
from hybrid_plugin.vllm import planning, rings, servable, specs
from hybrid_plugin.vllm.bundle_identity import _kept
from hybrid_plugin.vllm.bundle_layouts import PageForm, layouts_of
from hybrid_plugin.vllm.kernels import state_layers
from hybrid_plugin.vllm.manager import HybridKVCacheManager
from hybrid_plugin.vllm.planning import HybridKVCacheConfig
from hybrid_plugin.vllm.pool_memory import PoolMemory
from tests.vllm.fakes import admit, ids, request
from tests.vllm.kernel_passes import Row, common_of
from tests.vllm.ring_caches import KEYS, PAGE, RATIO, RINGS, WIDTH, Layers
from tests.vllm.test_servable import configuration

QWEN, GLM = "vllm.models.qwen4_exp", "vllm.models.glm5next"
PAGE_BYTES = PAGE * 2 * 8 * 2 * 2
KEY_BYTES = PAGE // RATIO * WIDTH * 2
RING_BYTES = RATIO * WIDTH * 2
BLOCK = 16 << 10


def config_of(layers: Layers, pages: int = 9, slots: int = 5) -> HybridKVCacheConfig:
    groups = planning.make_groups(layers.specs)
    return planning.make_config(layers.config, groups, PoolSizes(pages, slots))


def bound(layers: Layers, config: HybridKVCacheConfig, memory: PoolMemory) -> Any:
    """The views of all layers, which vLLM's caches have bound."""
    views = memory.allocate(config, torch.device("cpu"), KVCacheLayout.BLNHC)
    for name, cache in layers.caches.items():
        cache.bind_kv_cache(views[name])
    return views


# --------------------------------------------------------------- as it is planned


def test_rings_are_parts_of_slots_and_keys_parts_of_pages() -> None:
    groups = planning.make_groups(Layers().specs)
    assert [group.layer_names for group in groups] == [
        list(KEYS),
        ["kv 0", "kv 1"],
        list(RINGS),
        ["state"],
    ]
    kv, state = Pool.KV, Pool.STATE
    assert planning.pools_of(groups) == [kv, kv, state, state]
    layout = planning.make_layout(groups)
    assert layout.page_bytes == 2 * PAGE_BYTES + 2 * KEY_BYTES
    assert [group.state_bytes for group in layout.states] == [128, 128]
    assert layout.page_size == PAGE


def test_a_ring_is_addressed_by_column_0_as_vllm_knows_it() -> None:
    ring = specs.to_pool_spec("r", Layers().specs[RINGS[0]])
    assert isinstance(ring, specs.RingSpec) and rings.is_ring(ring)
    assert specs.window_of(ring) is None
    assert not ring.uses_slot_mapping
    assert ring.max_num_blocks_per_req(None, 1 << 20) == 1  # type: ignore[arg-type]


def test_vllm_gets_no_manager_of_rings() -> None:
    ring = specs.to_pool_spec("r", Layers().specs[RINGS[0]])
    manager = KVCacheSpecRegistry.get_manager_class(ring)
    with pytest.raises(RuntimeError, match="its own manager of RingSpec"):
        manager(ring)


def test_the_manager_gives_the_slot_as_the_ring_s_block() -> None:
    manager = HybridKVCacheManager(
        config_of(Layers()),
        HybridConfig.from_mapping({}),
        watermark=0.0,
        log_stats=False,
        clock=lambda: 0.0,
    )
    one, two = request("one", 40), request("two", 20, 500)
    keys, kv, ring, state = ids(admit(manager, one, 40))
    assert keys == kv and len(keys) == 3
    assert ring == state == [manager.cache.sequence("one").slot]
    *_, ring, state = ids(admit(manager, two, 20))
    assert ring == state == [manager.cache.sequence("two").slot]


def test_what_no_kernel_of_ours_runs_keeps_prompts_pausing() -> None:
    layers = Layers()
    config = SimpleNamespace(
        additional_config={},
        compilation_config=SimpleNamespace(
            static_forward_context={"state": SimpleNamespace()}
        ),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    both = state_layers.take_over(config, layers.specs)  # type: ignore[arg-type]
    assert both._count == 2
    alone = {"state": layers.specs["state"]}
    assert state_layers.take_over(config, alone)._count == 1  # type: ignore[arg-type]


# ------------------------------------------------------------- as it lies in memory


@pytest.mark.parametrize("positions", [False, True], ids=["keys", "with coordinates"])
def test_what_moves_a_slot_moves_its_ring(positions: bool) -> None:
    layers, memory = Layers(positions=positions), PoolMemory()
    views = bound(layers, config_of(layers), memory)
    first = layers.caches[RINGS[0]]
    assert first.key_cache.shape == (5, RATIO, 1, WIDTH)
    for number, name in enumerate(RINGS, start=1):
        layers.caches[name].key_cache[2] = number
        if positions:
            layers.caches[name].rope_position_cache[2] = 10 * number
    views["state"][2] = 7
    memory.executor.run([Copy(Pool.STATE, 2, 4), Zero(Pool.STATE, 2)])
    for number, name in enumerate(RINGS, start=1):
        cache = layers.caches[name]
        assert (cache.key_cache[4] == number).all()
        assert not cache.key_cache[:4].any()
        if positions:
            assert (cache.rope_position_cache[4] == 10 * number).all()
            assert not cache.rope_position_cache[:4].any()
    assert (views["state"][4] == 7).all() and not views["state"][2].any()


def test_what_copies_a_page_copies_its_keys() -> None:
    layers, memory = Layers(), PoolMemory()
    views = bound(layers, config_of(layers), memory)
    for number, name in enumerate(KEYS, start=1):
        layers.caches[name].kv_cache[3] = number
    views["kv 1"][3] = 5
    memory.executor.run([Copy(Pool.KV, 3, 6)])
    for number, name in enumerate(KEYS, start=1):
        assert (layers.caches[name].kv_cache[6] == number).all()
        assert not layers.caches[name].kv_cache[4:6].any()
    assert (views["kv 1"][6] == 5).all() and not views["kv 0"].any()


@pytest.fixture(params=[True, False], ids=["packed", "layer-major"])
def elastic(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Layers, their views and memory of elastic pools."""
    if not host_arena.is_available():
        pytest.skip("needs memory that can be returned")
    layers = Layers(positions=True)
    groups = planning.make_groups(layers.specs)
    plan = plan_elastic(
        planning.make_layout(groups, packed=request.param),
        96 * BLOCK,
        block_bytes=BLOCK,
        max_model_len=64,
        max_sequences=4,
    )
    config = planning.make_config(layers.config, groups, plan.sizes, plan)
    arena, memory = HostArena(97 * BLOCK, BLOCK), PoolMemory()
    assert arena.hold(arena.usable) is None
    memory.share(arena)
    views = bound(layers, config, memory)
    yield layers, views, memory, plan
    views.clear()


def test_elastic_slots_and_pages_carry_them_too(elastic: Any) -> None:
    layers, views, memory, plan = elastic
    granule = plan.pools[Pool.STATE].start
    memory.executor.run([Map(Pool.STATE, (granule,))])
    far = granule * plan.pools[Pool.STATE].per_granule
    ring, keys = layers.caches[RINGS[1]], layers.caches[KEYS[1]]
    ring.key_cache[1], ring.rope_position_cache[1] = 3, 1 << 40
    keys.kv_cache[1], views["kv 0"][1] = 2, 4
    memory.executor.run([Copy(Pool.STATE, 1, far), Copy(Pool.KV, 1, 2)])
    assert (ring.key_cache[far] == 3).all()
    assert (ring.rope_position_cache[far] == 1 << 40).all()
    assert not layers.caches[RINGS[0]].kv_cache[far].any()
    assert (keys.kv_cache[2] == 2).all() and (views["kv 0"][2] == 4).all()
    assert not layers.caches[KEYS[0]].kv_cache[2].any()


def test_rows_on_the_host_are_read_as_they_were_written() -> None:
    layers = Layers()
    config = config_of(layers)
    forms = {name: PageForm("ANY") for name in (*KEYS, "kv 0", "kv 1")}
    found = layouts_of(config, KVCacheLayout.BLNHC, forms)
    assert found.state is not None and found.state.opaque
    assert found.pages[Pool.KV].opaque
    entries, kinds = _kept(config)
    assert len(entries) == 7 and kinds == {"bfloat16"}


# ----------------------------------------------------------- as vLLM addresses it


def sequences_of(starts: torch.Tensor, out: torch.Tensor, *_: int) -> torch.Tensor:
    """In place of vLLM's kernel, which is for GPUs alone."""
    counts = starts.diff()
    found = torch.repeat_interleave(torch.arange(len(counts)), counts)
    out[: len(found)] = found
    return out


def test_vllm_s_tables_lead_into_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what decodes, begins between keys, or is padding on the reserved slot."""
    monkeypatch.setattr(
        qsa_cache, "build_qsa_metadata", qsa_cache._build_qsa_metadata_torch
    )
    monkeypatch.setattr(token_metadata, "compute_token_to_req_indices", sequences_of)
    layers = Layers()
    spec = specs.to_pool_spec(RINGS[0], layers.specs[RINGS[0]])
    rows = [Row(3, 9, 1), Row(0, 0, 1), Row(2, 7, 6, in_prompt=True)]
    metadata = layers.builder(spec, RINGS).build(0, common_of(rows))
    kept = [2 * RATIO + position % RATIO for position in range(9, 13)]
    assert metadata.slot_mapping.tolist() == [3 * RATIO + 1, -1, -1, -1, *kept]
    assert metadata.block_table.shape == (3, 1)


# ------------------------------------------------------------------------- served


def test_rings_of_models_whose_kernels_begin_anywhere_are_served() -> None:
    assert servable.unknown_kinds(QWEN) == []
    layers = Layers()
    assert rings.obstacle(layers.caches, layers.specs, drafts=False) is None
    assert rings.obstacle({}, {"state": layers.specs["state"]}, drafts=True) is None


def test_rings_of_others_are_refused() -> None:
    assert servable.unknown_kinds(GLM) == [rings.KIND]
    assert not rings.are_served(None)
    assert not rings.are_served(f"{QWEN}_two")
    layers = Layers()
    others = {name: SimpleNamespace() for name in layers.caches}
    found = rings.obstacle(others, layers.specs, drafts=False)
    assert found is not None and found.startswith("the plugin cannot serve layer ring")


def test_drafts_are_refused_early_and_late() -> None:
    """They would wait in the ring before it is known whether they count."""
    layers = Layers(drafts=2)
    found = rings.obstacle(layers.caches, layers.specs, drafts=True)
    assert found == rings.NO_DRAFTS
    config = configuration(QWEN)
    config.speculative_config = None
    assert not list(servable.obstacles(config))
    config.speculative_config = SimpleNamespace()
    assert list(servable.obstacles(config)) == [rings.NO_DRAFTS]
