# SPDX-License-Identifier: Apache-2.0
"""What rows of host memory hold is where vLLM's own views of the pools have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
import vllm._custom_ops as ops
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from hybrid_plugin.core.commands import Pool, PoolId
from hybrid_plugin.core.memory.elastic_plan import plan_elastic
from hybrid_plugin.core.memory.layout import PoolSizes
from hybrid_plugin.device import host_arena
from hybrid_plugin.device.host_arena import HostArena
from hybrid_plugin.tiers.bundle import Layouts
from hybrid_plugin.tiers.convert import Conversion, conversion
from hybrid_plugin.tiers.fields import Sizes, dense
from hybrid_plugin.tiers.row_layout import TOKEN, Field, RowLayout
from hybrid_plugin.vllm import planning
from hybrid_plugin.vllm.bundle_layouts import PageForm, layouts_of, page_form
from hybrid_plugin.vllm.pool_memory import PoolMemory

PAGE, DIM = 32, 32
BLOCK = 16 << 10
BUDGET = 256 * BLOCK
SHAPE: dict[str, Any] = {
    "block_size": PAGE,
    "num_kv_heads": 2,
    "head_size": DIM,
    "dtype": torch.bfloat16,
}
FULL = FullAttentionSpec(**SHAPE)
WIDE = FullAttentionSpec(**(SHAPE | {"num_kv_heads": 3, "head_size_v": 16}))
NEAR = SlidingWindowSpec(**SHAPE, sliding_window=64)
TAPS, CHANNELS = 3, 12


def states(kind: Kind, *shapes: tuple[int, ...], **more: Any) -> MambaSpec:
    dtypes = (torch.bfloat16, torch.float32)[-len(shapes) :]
    if kind is Kind.SHORT_CONV:
        dtypes = (torch.bfloat16,)
    return MambaSpec(
        block_size=1024, shapes=shapes, dtypes=dtypes, mamba_type=kind, **more
    )


DELTA = states(Kind.GDN_ATTN, (TAPS, CHANNELS), (2, 8, 4))
SPECS: dict[str, KVCacheSpec] = {
    "model.layers.0.linear_attn": DELTA,
    "model.layers.1.self_attn.attn": FULL,
    "model.layers.2.mamba": states(Kind.MAMBA2, (TAPS, CHANNELS), (2, 8, 16)),
    "model.layers.2.self_attn.attn": WIDE,
    "model.layers.3.self_attn.attn": FULL,
    "model.layers.4.self_attn.attn": NEAR,
    "model.layers.5.linear": states(Kind.LINEAR, (2, 8, 8)),
    "model.layers.6.conv": states(Kind.SHORT_CONV, (TAPS, CHANNELS)),
    "model.layers.7.linear_attn": DELTA,
    "model.layers.8.mamba": states(Kind.MAMBA1, (TAPS, CHANNELS), (12, 16)),
}
SIZES = PoolSizes(pages=4, slots=4, windows=(4,))
ENGINE: Any = SimpleNamespace(
    cache_config=SimpleNamespace(prefix_cache_retention_interval=None)
)


class Row:
    """A page, or a slot, as its bytes lie in host memory, read by its layout."""

    def __init__(self, pools: PoolMemory, pool: PoolId, index: int) -> None:
        parts = pools.executor._arenas[pool].parts
        self.bytes = torch.cat([part[index] for part in parts]).numpy().view(np.uint8)

    def read(
        self, layout: RowLayout, name: str, dtype: str, sizes: Sizes
    ) -> torch.Tensor:
        """One field, as a dense array."""
        field = next(f for f in layout.fields if f.name == name)
        target = dense(name, dtype, 0, sizes)
        rows = RowLayout(layout.row_bytes, layout.tokens, (field,))
        move = conversion(rows, RowLayout(target.end, layout.tokens, (target,)))
        assert isinstance(move, Conversion), move
        out = np.zeros((1, target.end), dtype=np.uint8)
        source = np.zeros((1, layout.row_bytes), dtype=np.uint8)
        source[0, : len(self.bytes)] = self.bytes
        if layout.tokens:
            move.pages(source, out, 0, layout.tokens)
        else:
            move.state(source[0], out[0])
        kind = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
        return torch.from_numpy(out).view(kind).view([size for _, size in sizes])


def forms(backend: str = "FLASH_ATTN", **more: Any) -> dict[str, PageForm]:
    return {name: PageForm(backend, **more) for name in SPECS}


def random(views: Mapping[str, torch.Tensor]) -> None:
    """Give every layer values that are like no others."""
    for name, view in views.items():
        if isinstance(SPECS[name], MambaSpec):
            view.copy_(torch.randint(-100, 100, view.shape, dtype=torch.int8))
        else:
            view.copy_(torch.randn(view.shape))


def check_pages(
    pools: PoolMemory,
    layouts: Layouts,
    views: Mapping[str, torch.Tensor],
    ids: Sequence[int],
) -> None:
    for number, pool in ((1, Pool.KV), (2, Pool.KV), (3, Pool.KV), (4, "window0")):
        name = f"model.layers.{number}.self_attn.attn"
        spec: Any = SPECS[name]
        heads, key, value = spec.num_kv_heads, spec.head_size, spec.head_size_v
        view = views[name]  # [B, H, N, C]
        block = view.shape[2]
        for page in ids:
            first = page * PAGE // block
            own = view[first : first + PAGE // block].transpose(1, 2)
            content = own.reshape(PAGE, heads, key + value)
            row, layout = Row(pools, pool, page), layouts.pages[pool]
            for part, size, wanted in (
                ("key", key, content[..., :key]),
                ("value", value, content[..., key:]),
            ):
                sizes = ((TOKEN, PAGE), ("head", heads), ("dim", size))
                read = row.read(layout, f"{number}.{part}", "bfloat16", sizes)
                assert torch.equal(read, wanted), (name, part)


def bound(spec: MambaSpec, view: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a layer makes of its view."""
    layer: Any = SimpleNamespace(
        get_state_shape=lambda: spec.shapes, get_state_dtype=lambda: spec.dtypes
    )
    MambaBase.bind_kv_cache(layer, view)
    return tuple(layer.kv_cache)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Random bytes are no numbers now and then, which equal nothing."""
    kind = {2: torch.int16, 4: torch.int32}[one.itemsize]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


def check_states(
    pools: PoolMemory, layouts: Layouts, views: Mapping[str, torch.Tensor]
) -> None:
    axes = {
        Kind.GDN_ATTN: ("head", "value", "key"),
        Kind.MAMBA2: ("head", "channel", "state"),
        Kind.MAMBA1: ("head", "state"),
        Kind.LINEAR: ("head", "key", "value"),
    }
    assert layouts.state is not None
    checked = 0
    for name, spec in SPECS.items():
        if not isinstance(spec, MambaSpec):
            continue
        tensors, number = list(bound(spec, views[name])), name.split(".")[2]
        row = Row(pools, Pool.STATE, 2)
        if spec.mamba_type is not Kind.LINEAR:
            sizes: Sizes = (("tap", TAPS), ("channel", CHANNELS))
            read = row.read(layouts.state, f"{number}.conv", "bfloat16", sizes)
            assert same_bits(read, tensors.pop(0)[2]), name
        if tensors:
            (state,) = tensors
            names = axes[spec.mamba_type]
            if spec.mamba_type is Kind.MAMBA1:  # a channel is a head of its own
                sizes = (("head", 12), ("channel", 1), ("state", 16))
                state = state[:, :, None]
            else:
                sizes = tuple(zip(names, state.shape[1:], strict=True))
            read = row.read(layouts.state, f"{number}.state", "float32", sizes)
            assert same_bits(read, state[2]), name
        checked += 1
    assert checked == 6


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("block", [PAGE, PAGE // 2])
def test_rows_of_fixed_pools(order: str, block: int) -> None:
    config = planning.make_config(ENGINE, planning.make_groups(SPECS), SIZES)
    pools = PoolMemory()
    layout = KVCacheLayout[order]
    blocks = [block] * len(config.kv_cache_groups)
    views = pools.allocate(config, torch.device("cpu"), layout, blocks)
    random(views)
    layouts = layouts_of(config, layout, forms(block=block))
    check_pages(pools, layouts, views, [1, 3])
    check_states(pools, layouts, views)


@pytest.mark.parametrize("order", ["BLHNC", "BLNHC"])
def test_rows_of_packed_pools(order: str) -> None:
    if not host_arena.is_available():
        pytest.skip("needs memory that can be returned")
    groups = planning.make_groups(SPECS)
    plan = plan_elastic(
        planning.make_layout(groups, packed=True),
        BUDGET,
        block_bytes=BLOCK,
        max_model_len=64,
        max_sequences=2,
    )
    config = planning.make_config(ENGINE, groups, plan.sizes, plan)
    memory = HostArena(BUDGET + BLOCK, BLOCK)
    assert memory.hold(memory.usable) is None
    pools, layout = PoolMemory(), KVCacheLayout[order]
    pools.share(memory)
    views = pools.allocate(config, torch.device("cpu"), layout)
    mapped = {name: view[:3] for name, view in views.items()}
    random(mapped)
    layouts = layouts_of(config, layout, forms())
    check_pages(pools, layouts, mapped, [1, 2])
    check_states(pools, layouts, mapped)
    views.clear()


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU build only")
@pytest.mark.parametrize("isa", ["vec", "vec16"])
def test_pages_of_the_cpu_kernels(isa: str) -> None:
    specs = {name: SPECS[name] for name in SPECS if ".1." in name or ".3." in name}
    specs["model.layers.0.linear_attn"] = DELTA
    config = planning.make_config(ENGINE, planning.make_groups(specs), SIZES)
    pools, layout = PoolMemory(), KVCacheLayout.LBHNC
    views = pools.allocate(config, torch.device("cpu"), layout)
    name = "model.layers.3.self_attn.attn"
    keys, values = torch.randn(2, 4 * PAGE, 2, DIM).to(torch.bfloat16)
    # As `vllm.v1.attention.backends.cpu_attn` divides a page.
    halves = views[name].reshape(4, 2, 2 * PAGE, DIM).chunk(2, dim=2)
    assert halves[0].data_ptr() == views[name].data_ptr()
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, torch.arange(4 * PAGE), isa)
    found = layouts_of(config, layout, forms("CPU_ATTN", instructions=isa))
    sizes = ((TOKEN, PAGE), ("head", 2), ("dim", DIM))
    row = Row(pools, Pool.KV, 2)
    for part, wanted in (("key", keys), ("value", values)):
        read = row.read(found.pages[Pool.KV], f"3.{part}", "bfloat16", sizes)
        assert torch.equal(read, wanted[2 * PAGE : 3 * PAGE])


def test_latent_vectors() -> None:
    spec = MLAAttentionSpec(
        block_size=PAGE, num_kv_heads=1, head_size=24, dtype=torch.bfloat16
    )
    name = "model.layers.1.self_attn.attn"
    specs = {name: spec, "model.layers.0.linear_attn": DELTA}
    config = planning.make_config(ENGINE, planning.make_groups(specs), SIZES)
    pools, layout = PoolMemory(), KVCacheLayout.LBNHC
    views = pools.allocate(config, torch.device("cpu"), layout)
    views[name].copy_(torch.randn(views[name].shape))
    found = layouts_of(config, layout, forms("FLASHMLA"))
    sizes = ((TOKEN, PAGE), ("dim", 24))
    read = Row(pools, Pool.KV, 3).read(
        found.pages[Pool.KV], "1.latent", "bfloat16", sizes
    )
    assert torch.equal(read, views[name][3, 0])


def rows_with(spec: KVCacheSpec, order: str, form: PageForm) -> Layouts:
    specs = {"layers.1.attn": spec, "layers.0.linear_attn": DELTA}
    config = planning.make_config(ENGINE, planning.make_groups(specs), SIZES)
    return layouts_of(config, KVCacheLayout[order], {"layers.1.attn": form})


OPAQUE: dict[str, tuple[KVCacheSpec, PageForm]] = {
    "of AMX": (FULL, PageForm("CPU_ATTN", "amx")),
    "of another backend": (FULL, PageForm("FLEX_ATTENTION")),
    "quantised": (
        FullAttentionSpec(
            **(SHAPE | {"dtype": torch.uint8}), kv_quant_mode=KVQuantMode.FP8_PER_TENSOR
        ),
        PageForm("FLASH_ATTN"),
    ),
    "of a type that has no name": (
        FullAttentionSpec(**(SHAPE | {"dtype": torch.int8})),
        PageForm("FLASH_ATTN"),
    ),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_what_nobody_can_name_is_opaque(name: str) -> None:
    spec, form = OPAQUE[name]
    found = rows_with(spec, "LBNHC", form)
    assert found.pages[Pool.KV].opaque.startswith("vLLM ")
    assert found.state is not None and found.state.fields
    assert rows_with(spec, "LBNHC", form) == found
    assert rows_with(spec, "LBHNC", form) != found, "bytes lie otherwise"


def test_states_of_an_unknown_kind_are_opaque() -> None:
    specs = {
        "layers.1.attn": FULL,
        "layers.0.x": MambaSpec(
            block_size=1024,
            shapes=((3, 5), (3, 5), (4, 4)),
            dtypes=(torch.float32,) * 3,
            mamba_type=Kind.GDN_ATTN,
        ),
    }
    config = planning.make_config(ENGINE, planning.make_groups(specs), SIZES)
    form = {"layers.1.attn": PageForm("FLASH_ATTN")}
    found = layouts_of(config, KVCacheLayout.LBNHC, form)
    assert found.state is not None and found.state.opaque
    assert found.pages[Pool.KV].fields


def test_drafts_widen_a_convolution_and_are_not_stored() -> None:
    wide = states(
        Kind.GDN_ATTN, (TAPS + 2, CHANNELS), (2, 8, 4), num_speculative_blocks=2
    )
    names = {}
    for spec in (DELTA, wide):
        specs = {"layers.1.attn": FULL, "layers.0.x": spec}
        config = planning.make_config(ENGINE, planning.make_groups(specs), SIZES)
        form = {"layers.1.attn": PageForm("FLASH_ATTN")}
        layout = layouts_of(config, KVCacheLayout.LBNHC, form).state
        assert layout is not None
        names[spec] = layout
    conv: list[Field] = [layout.fields[0] for layout in names.values()]
    assert [field.size_of("tap") for field in conv] == [TAPS, TAPS]
    assert isinstance(conversion(names[wide], names[DELTA]), Conversion)


def test_the_form_of_a_layer() -> None:
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    layer = SimpleNamespace(get_attn_backend=lambda: backend, isa="vec16")
    assert page_form(layer, 16) == PageForm("CPU_ATTN", "vec16", 16)
    del layer.isa
    assert page_form(layer, None) == PageForm("CPU_ATTN")
