# SPDX-License-Identifier: Apache-2.0
"""SGLang's own attention on its own window pool: positions that differ in each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from hybrid_plugin.sglang_cpu.window_attention import read_windows_in_their_pool

WINDOW_LAYER, FULL_LAYER = 0, 1
LENGTH, WIDTH, TOKENS = 10, 8, 36
WINDOW = 3


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One request of `LENGTH` tokens; its window pages lie in another order."""
    for name in ("forward_extend", "forward_decode"):
        original = getattr(TorchNativeAttnBackend, name)
        original = getattr(original, "_hybrid_plugin_original", original)
        monkeypatch.setattr(TorchNativeAttnBackend, name, original)
    read_windows_in_their_pool()
    pool = SWAKVPool(
        size=TOKENS - 4,
        size_swa=TOKENS - 4,
        page_size=4,
        dtype=torch.float32,
        head_num=1,
        head_dim=WIDTH,
        swa_attention_layer_ids=[WINDOW_LAYER],
        full_attention_layer_ids=[FULL_LAYER],
        device="cpu",
    )
    pool.register_mapping(torch.arange(TOKENS).flip(0))
    table = torch.zeros(2, 16, dtype=torch.int32)
    table[1, :LENGTH] = torch.arange(8, 8 + LENGTH)
    rows = SimpleNamespace(req_to_token=table)
    runner: Any = SimpleNamespace(
        device="cpu", req_to_token_pool=rows, token_to_kv_pool=pool
    )
    return TorchNativeAttnBackend(runner)


def batch(backend: Any, start: int) -> Any:
    """The request's tokens from `start` on."""
    return SimpleNamespace(
        out_cache_loc=backend.req_to_token_pool.req_to_token[1, start:LENGTH].long(),
        req_pool_indices=torch.tensor([1]),
        seq_lens=torch.tensor([LENGTH]),
        extend_prefix_lens=torch.tensor([start]),
        extend_seq_lens=torch.tensor([LENGTH - start]),
        encoder_lens=None,
    )


def layer_of(layer: int) -> Any:
    return SimpleNamespace(
        layer_id=layer,
        qk_head_dim=WIDTH,
        v_head_dim=WIDTH,
        tp_q_head_num=1,
        tp_k_head_num=1,
        is_cross_attention=False,
        attn_type=None,
        scaling=1.0,
        sliding_window_size=WINDOW if layer == WINDOW_LAYER else -1,
    )


@pytest.mark.parametrize("layer", [WINDOW_LAYER, FULL_LAYER], ids=["window", "full"])
def test_attention_is_that_of_the_tokens(backend: Any, layer: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(LENGTH, 1, WIDTH) for _ in range(3))
    places = torch.arange(LENGTH)
    seen = places[None] <= places[:, None]
    if layer == WINDOW_LAYER:
        seen &= places[None] >= places[:, None] - WINDOW
    scores = (q[:, 0] @ k[:, 0].T).masked_fill(~seen, float("-inf"))
    expected = scores.softmax(-1) @ v[:, 0]
    kind, rows = layer_of(layer), backend.req_to_token_pool

    got = []
    for start, end, forward in (
        (0, LENGTH - 1, backend.forward_extend),
        (LENGTH - 1, LENGTH, backend.forward_decode),
    ):
        part = batch(backend, start)
        part.seq_lens[0], part.extend_seq_lens[0] = end, end - start
        part.out_cache_loc = part.out_cache_loc[: end - start]
        backend.init_forward_metadata(part)
        new = slice(start, end)
        got.append(forward(q[new].flatten(1), k[new], v[new], kind, part))
    torch.testing.assert_close(torch.cat(got).view(LENGTH, WIDTH), expected)
    assert backend.req_to_token_pool is rows
