# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over latents: a chain of drafts reads what decode steps would."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.model_executor import forward_context
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from hybrid_plugin.sglang_cpu import index_keys, sparse_latents

SIZE, WIDTH, PAGE, HEADS, LATENT = 4, 128, 64, 2, 16
PROMPTS = (9, 26)
DRAFTS = 6
TOKENS = SIZE * PAGE
"""Of a page."""


class Pool:
    """Two sequences, one in each of pages 1 and 2, and their rings."""

    index_kpool, index_head_dim, index_page_size = SIZE, WIDTH, PAGE

    def __init__(self) -> None:
        self.buf = torch.zeros(3, PAGE * (WIDTH + 4), dtype=torch.uint8)
        ring = torch.zeros(3, SIZE + DRAFTS, WIDTH, dtype=torch.bfloat16)
        self.ring = (ring, ring.clone())
        self.latents = torch.zeros(3 * TOKENS, 1, LATENT)

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        return self.buf

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.latents

    def kpool_decode_update_index_cache(self, layer_id: int, **given: Any) -> None:
        ring = dict(zip(("tail_k", "tail_score"), self.ring, strict=True))
        index_keys.step(self, self.buf, **ring, **given)


class Layer:
    """An attention layer, its indexer, and what runs them on the platform."""

    layer_id, v_head_dim, tp_q_head_num, scaling = 0, LATENT, HEADS, 0.25

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        self.indexer = SimpleNamespace(
            skip_rope=True,
            wk=lambda x: (x,),
            k_norm=torch.nn.Identity(),
            wq_b=lambda q: (q,),
            weights_proj=lambda x: (x[:, :HEADS],),
            n_heads=HEADS,
            head_dim=WIDTH,
            softmax_scale=WIDTH**-0.5,
            scale_fmt=None,
            index_kpool=SIZE,
            index_topk=2 * SIZE,
            index_kpool_compress_gate=torch.randn(WIDTH, WIDTH) / WIDTH,
            index_kpool_compress_ape=torch.randn(SIZE, WIDTH),
        )
        self.pool = Pool()
        rows = torch.arange(3 * TOKENS).view(3, TOKENS)
        runner: Any = SimpleNamespace(
            device="cpu",
            token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=rows),
        )
        self.backend = sparse_latents.make_backend(runner)
        patch.setattr(forward_context, "get_attn_backend", lambda: self.backend)
        patch.setattr(forward_context, "get_token_to_kv_pool", lambda: self.pool)

    def run(
        self, mode: ForwardMode, starts: list[int], given: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What each token chooses, and its attention."""
        count = len(given["x"]) // len(starts)
        rows, begin = torch.tensor([1, 2]), torch.tensor(starts)
        positions = (begin[:, None] + torch.arange(count)).flatten()
        lengths = begin if mode.is_target_verify() else begin + count
        batch: Any = SimpleNamespace(
            forward_mode=mode,
            positions=positions,
            seq_lens=lengths,
            req_pool_indices=rows,
            out_cache_loc=rows.repeat_interleave(count) * TOKENS + positions,
            spec_info=SimpleNamespace(draft_token_num=count, custom_mask=None),
        )
        self.backend.init_forward_metadata(batch)
        chosen = sparse_latents.choose(
            self.indexer, given["x"], given["q"], positions, batch, layer_id=0
        )
        forward = self.backend.forward_extend
        if mode.is_decode():
            forward = self.backend.forward_decode
        latents = given["x"][:, :LATENT]
        query = given["q"].view(len(latents), HEADS, -1)[..., :LATENT]
        out = forward(query, latents, None, self, batch, topk_indices=chosen)
        return chosen, out


def tokens(seed: int, count: int) -> dict[str, torch.Tensor]:
    """Of two sequences, `count` each."""
    chance = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(2 * count, WIDTH, generator=chance),
        "q": torch.randn(2 * count, HEADS * WIDTH, generator=chance),
    }


def of_step(given: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """One token of each sequence."""
    return {name: one.view(2, -1, one.shape[1])[:, step] for name, one in given.items()}


def prefilled(patch: pytest.MonkeyPatch) -> Layer:
    """Both prompts, token by token."""
    layer, given = Layer(patch), tokens(1, max(PROMPTS))
    for step in range(max(PROMPTS)):
        starts = [max(step - max(PROMPTS) + length, 0) for length in PROMPTS]
        layer.run(ForwardMode.DECODE, starts, of_step(given, step))
    return layer


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2"])
@pytest.mark.parametrize("accepted", [0, 2, DRAFTS - 1])
def test_drafts_read_what_decode_steps_would(mode: str, accepted: int) -> None:
    """A step of drafts of which some are rejected, and another one behind it."""
    with pytest.MonkeyPatch.context() as patch:
        layer = prefilled(patch)
        first, second = tokens(2, DRAFTS), tokens(3, DRAFTS)
        verified = [layer.run(ForwardMode[mode], list(PROMPTS), first)]
        behind = [length + 1 + accepted for length in PROMPTS]
        verified.append(layer.run(ForwardMode[mode], behind, second))
        layer = prefilled(patch)
        for step in range(1 + accepted):
            starts = [length + step for length in PROMPTS]
            chosen, out = layer.run(ForwardMode.DECODE, starts, of_step(first, step))
            same(verified[0], step, chosen, out)
        for step in range(DRAFTS):
            starts = [length + step for length in behind]
            chosen, out = layer.run(ForwardMode.DECODE, starts, of_step(second, step))
            same(verified[1], step, chosen, out)


def same(
    verified: tuple[torch.Tensor, torch.Tensor],
    step: int,
    chosen: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """A step's tokens chose and read the same in both ways."""
    theirs = [one.view(2, DRAFTS, -1)[:, step] for one in verified]
    assert torch.equal(theirs[0].sort(1).values, chosen.sort(1).values)
    torch.testing.assert_close(theirs[1], out)
