# SPDX-License-Identifier: Apache-2.0
"""Fields name the bytes that vLLM itself reads and writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
import vllm._custom_ops as ops
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    create_kv_cache_views,
)

from hybrid_plugin.tiers.convert import Conversion, conversion
from hybrid_plugin.tiers.fields import convolution, delta_state, dense
from hybrid_plugin.tiers.row_layout import TOKEN, RowLayout
from hybrid_plugin.tiers.vllm_fields import PageOrder, attention, cpu_attention

LAYERS, PAGES, TOKENS, HEADS, DIM = 2, 3, 32, 2, 32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ISA = ["vec", "vec16"]


def plain(dtype: str) -> RowLayout:
    """Each layer's keys, then its values, `[tokens, heads, dim]`."""
    size = TOKENS * HEADS * DIM * DTYPES[dtype].itemsize
    names = [f"{layer}.{half}" for layer in range(LAYERS) for half in ("key", "value")]
    sizes = ((TOKEN, TOKENS), ("head", HEADS), ("dim", DIM))
    fields = [dense(n, dtype, i * size, sizes) for i, n in enumerate(names)]
    return RowLayout(size * len(names), TOKENS, tuple(fields))


def read_by_fields(rows: torch.Tensor, layout: RowLayout, dtype: str) -> torch.Tensor:
    """`[layers, keys | values, tokens, heads, dim]` of rows `[pages, bytes]`."""
    target = plain(dtype)
    move = conversion(layout, target)
    assert isinstance(move, Conversion), move
    out = np.zeros((PAGES, target.row_bytes), dtype=np.uint8)
    move.pages(rows.numpy().view(np.uint8), out, 0, PAGES * TOKENS)
    read = torch.from_numpy(out).view(DTYPES[dtype])
    by_page = read.view(PAGES, LAYERS, 2, TOKENS, HEADS, DIM)
    return by_page.permute(1, 2, 0, 3, 4, 5).reshape(LAYERS, 2, -1, HEADS, DIM)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("block", [TOKENS, TOKENS // 4])
def test_pages_of_the_gpu_backends(
    dtype: str, order: PageOrder, packed: bool, block: int
) -> None:
    if packed and block != TOKENS:
        pytest.skip("packed pages are not divided")
    kind = DTYPES[dtype]
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=kind
    )
    page = spec.page_size_bytes
    prefix = "BL" if packed else "LB"
    raw = torch.zeros(LAYERS * PAGES * page, dtype=torch.int8)
    tensor: Any = SimpleNamespace(
        layers=["a", "b"],
        offset=0,
        layer_stride=page if packed else PAGES * page,
        block_stride=LAYERS * page if packed else page,
    )
    layout = KVCacheLayout[prefix + order.value]
    views = create_kv_cache_views(raw, spec, PAGES, layout, tensor, block)
    values = torch.randn(LAYERS, 2, PAGES * TOKENS, HEADS, DIM).to(kind)
    for view, (keys, values_) in zip(views, values, strict=True):
        content = torch.cat([keys, values_], dim=-1)  # [tokens, heads, content]
        view.copy_(content.view(-1, block, HEADS, 2 * DIM).transpose(1, 2))
    if packed:
        rows = raw.view(PAGES, LAYERS * page)
    else:
        rows = raw.view(LAYERS, PAGES, page).transpose(0, 1).reshape(PAGES, -1)
    fields = [
        field
        for layer in range(LAYERS)
        for field in attention(
            str(layer),
            dtype,
            layer * page,
            tokens=TOKENS,
            heads=HEADS,
            key_dim=DIM,
            value_dim=DIM,
            order=order,
            block=block,
        )
    ]
    read = read_by_fields(rows, RowLayout(LAYERS * page, TOKENS, tuple(fields)), dtype)
    assert torch.equal(read, values)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU build only")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISA)
def test_pages_of_the_cpu_backend(dtype: str, isa: str) -> None:
    kind = DTYPES[dtype]
    page = 2 * HEADS * TOKENS * DIM * kind.itemsize
    caches = torch.zeros(PAGES, LAYERS, HEADS, 2 * TOKENS, DIM, dtype=kind)
    values = torch.randn(LAYERS, 2, PAGES * TOKENS, HEADS, DIM).to(kind)
    for layer, (keys, values_) in enumerate(values):
        halves = caches[:, layer].chunk(2, dim=2)
        slots = torch.arange(PAGES * TOKENS)
        ops.cpu_attn_reshape_and_cache(keys, values_, *halves, slots, isa)
    fields = [
        field
        for layer in range(LAYERS)
        for field in cpu_attention(
            str(layer), dtype, layer * page, tokens=TOKENS, heads=HEADS, dim=DIM
        )
    ]
    rows = caches.view(PAGES, -1).view(torch.int8)
    read = read_by_fields(rows, RowLayout(LAYERS * page, TOKENS, tuple(fields)), dtype)
    assert torch.equal(read, values)


@pytest.mark.parametrize("channels_first", [True, False])
def test_states_of_a_gated_delta_net(
    monkeypatch: pytest.MonkeyPatch, channels_first: bool
) -> None:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS" if channels_first else "SD")
    from vllm.model_executor.layers.mamba import mamba_utils

    mamba_utils.get_conv_state_layout.cache_clear()
    taps, drafts = 3, 2
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
        1, 2, 4, 8, 16, taps + 1, drafts
    )
    mamba_utils.get_conv_state_layout.cache_clear()
    (rows_, columns), state = shapes
    channels = 2 * 2 * 8 + 4 * 16
    wanted = (channels, taps + drafts) if channels_first else (taps + drafts, channels)
    assert (rows_, columns) == wanted
    size = rows_ * columns * 2
    conv = convolution(
        "0",
        "bfloat16",
        0,
        channels=channels,
        taps=taps,
        columns=taps + drafts,
        channels_first=channels_first,
    )
    recurrent = delta_state("0", "float32", size, heads=4, values=16, keys=8)
    assert tuple(axis.size for axis in recurrent.axes) == state
    layout = RowLayout(recurrent.end, 0, (conv, recurrent))
    window = torch.randn(*wanted).to(torch.bfloat16)
    matrix = torch.randn(*state)
    row = torch.cat(
        [window.view(-1).view(torch.uint8), matrix.view(-1).view(torch.uint8)]
    )
    target = RowLayout(
        (channels * taps + 4 * 16 * 8) * 4,
        0,
        (
            dense("0.conv", "float32", 0, (("channel", channels), ("tap", taps))),
            dense(
                "0.state",
                "float32",
                channels * taps * 4,
                (("head", 4), ("value", 16), ("key", 8)),
            ),
        ),
    )
    move = conversion(layout, target)
    assert isinstance(move, Conversion), move
    out = np.zeros(target.row_bytes, dtype=np.uint8)
    move.state(row.numpy(), out)
    read = torch.from_numpy(out).view(torch.float32)
    taken = window if channels_first else window.T
    assert torch.equal(
        read[: channels * taps].view(channels, taps), taken[:, :taps].float()
    )
    assert torch.equal(read[channels * taps :].view(state), matrix)
