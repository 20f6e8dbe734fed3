# SPDX-License-Identifier: Apache-2.0
"""Fields name the bytes that SGLang's pools, and ours below them, read and write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.configs.mamba_utils import KimiLinearStateShape, Mamba2StateShape

from hybrid_plugin.sglang.page_layout import views
from hybrid_plugin.sglang.pool_rows import page_rows
from hybrid_plugin.sglang.slots import slot_bytes, state_views
from hybrid_plugin.tiers.convert import Conversion, conversion
from hybrid_plugin.tiers.fields import (
    convolution,
    delta_state,
    dense,
    selective_state,
)
from hybrid_plugin.tiers.row_layout import TOKEN, Field, RowLayout
from hybrid_plugin.tiers.sglang_fields import tensor

LAYERS, PAGES, TOKENS, HEADS, DIM = 2, 3, 16, 2, 16
KIND = torch.bfloat16
NAMES = [f"{layer}.key" for layer in range(LAYERS)] + [
    f"{layer}.value" for layer in range(LAYERS)
]
SIZE = HEADS * DIM * KIND.itemsize
"""Bytes of a token in one tensor."""


def read_by_fields(rows: torch.Tensor, fields: list[Field]) -> torch.Tensor:
    """`[names, tokens, heads, dim]` of rows `[pages, bytes]`."""
    sizes = ((TOKEN, TOKENS), ("head", HEADS), ("dim", DIM))
    wanted = [
        dense(name, "bfloat16", i * TOKENS * SIZE, sizes)
        for i, name in enumerate(NAMES)
    ]
    target = RowLayout(len(NAMES) * TOKENS * SIZE, TOKENS, tuple(wanted))
    move = conversion(RowLayout(rows.shape[1], TOKENS, tuple(fields)), target)
    assert isinstance(move, Conversion), move
    out = np.zeros((PAGES, target.row_bytes), dtype=np.uint8)
    move.pages(rows.numpy().view(np.uint8), out, 0, PAGES * TOKENS)
    read = torch.from_numpy(out).view(KIND).view(PAGES, len(NAMES), TOKENS, HEADS, DIM)
    return read.transpose(0, 1).reshape(len(NAMES), -1, HEADS, DIM)


def random_pages() -> torch.Tensor:
    return torch.randn(len(NAMES), PAGES * TOKENS, HEADS, DIM).to(KIND)


def test_pages_of_sglangs_own_pool() -> None:
    values = random_pages()
    MHATokenToKVPool = type("MHATokenToKVPool", (), {})  # noqa: N806
    pool: Any = MHATokenToKVPool()
    pool.k_buffer, pool.v_buffer = list(values[:LAYERS]), list(values[LAYERS:])
    rows = torch.cat(page_rows(pool, TOKENS), dim=1)
    fields = [
        tensor(
            name,
            "bfloat16",
            i * TOKENS * SIZE,
            tokens=TOKENS,
            heads=HEADS,
            dim=DIM,
        )
        for i, name in enumerate(NAMES)
    ]
    assert torch.equal(read_by_fields(rows, fields), values)


@pytest.mark.parametrize("start", [0, 64])
def test_packed_pages_of_elastic_pools(start: int) -> None:
    values = random_pages()
    step = start + len(NAMES) * SIZE + 32
    rows = torch.zeros(PAGES, TOKENS * step, dtype=torch.int8)
    shapes = [value.shape for value in values]
    made = views(rows, TOKENS, shapes, KIND, start)
    assert made is not None
    for view, value in zip(made, values, strict=True):
        view.copy_(value)
    fields = [
        tensor(
            name,
            "bfloat16",
            start + i * SIZE,
            tokens=TOKENS,
            heads=HEADS,
            dim=DIM,
            token_bytes=step,
        )
        for i, name in enumerate(NAMES)
    ]
    assert torch.equal(read_by_fields(rows, fields), values)


def params(shape: Any) -> Any:
    return SimpleNamespace(
        shape=shape,
        dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
        layers=[0, 1, 2],
    )


def aligned(size: int) -> int:
    return -(-size // 128) * 128


@pytest.mark.parametrize("kind", ["mamba2", "kda"])
def test_slots_of_elastic_pools(kind: str) -> None:
    if kind == "mamba2":
        shape: Any = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=12,
            n_groups=1,
            num_heads=3,
            head_dim=4,
            state_size=8,
            conv_kernel=4,
        )
        channels, channels_first = 12 + 2 * 8, True
    else:
        shape = KimiLinearStateShape.create(tp_world_size=1, num_heads=3, head_dim=4)
        channels, channels_first = 3 * 12, False
    model = params(shape)
    conv_size = aligned(channels * 3 * 2)
    state_size = aligned(int(np.prod(shape.temporal)) * 4)
    rows = torch.zeros(2, slot_bytes(model), dtype=torch.int8)
    conv, state = state_views(rows, model)
    windows = torch.randn(conv.shape[0], *conv.shape[2:]).to(torch.bfloat16)
    states = torch.randn(state.shape[0], *state.shape[2:])
    conv[:, 1], state[:, 1] = windows, states
    fields: list[Field] = []
    for layer in range(3):
        place = layer * conv_size
        fields.append(
            convolution(
                str(layer),
                "bfloat16",
                place,
                channels=channels,
                taps=3,
                channels_first=channels_first,
            )
        )
        place = 3 * conv_size + layer * state_size
        a, b, c = shape.temporal
        fields.append(
            selective_state(str(layer), "float32", place, heads=a, channels=b, states=c)
            if kind == "mamba2"
            else delta_state(str(layer), "float32", place, heads=a, values=b, keys=c)
        )
    layout = RowLayout(rows.shape[1], 0, tuple(fields))
    target_fields, place = [], 0
    for field in sorted(fields, key=lambda field: field.name):
        names = dict.fromkeys(axis.name for axis in field.axes)
        order = ("channel", "tap") if "tap" in names else tuple(names)
        sizes = [(name, field.size_of(name)) for name in order]
        target_fields.append(dense(field.name, "float32", place, sizes))
        place = target_fields[-1].end
    target = RowLayout(place, 0, tuple(target_fields))
    move = conversion(layout, target)
    assert isinstance(move, Conversion), move
    out = np.zeros(place, dtype=np.uint8)
    move.state(rows[1].numpy().view(np.uint8), out)
    for layer in range(3):
        by_channel = windows[layer] if channels_first else windows[layer].T
        wanted = {"conv": by_channel.float(), "state": states[layer]}
        for part, value in wanted.items():
            field = next(f for f in target_fields if f.name == f"{layer}.{part}")
            read = torch.from_numpy(out[field.offset : field.end].copy())
            assert torch.equal(read.view(torch.float32).view(value.shape), value)
