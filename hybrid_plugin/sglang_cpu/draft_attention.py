# SPDX-License-Identifier: Apache-2.0
"""Attention of drafts that are verified: to what came before them, and to ancestors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

_APPLIED = "_hybrid_plugin_drafts"


def verify_with_a_mask() -> None:
    """Symptom: on a CPU, verifying drafts fails, "'NoneType' object has no ...".

    Cause: PyTorch's attention takes what it is given for a prompt, whose lengths it
    reads, and knows no mask among drafts.
    Fix: give drafts a function of their own.
    Delete when: `TorchNativeAttnBackend` reads `custom_mask`.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    original = TorchNativeAttnBackend.forward_extend
    if not hasattr(original, _APPLIED):
        TorchNativeAttnBackend.forward_extend = _verifying(original)


def _verifying(original: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(
        self: Any,
        q: torch.Tensor,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not forward_batch.forward_mode.is_target_verify():
            return original(
                self, q, k, v, layer, forward_batch, save_kv_cache, **kwargs
            )
        if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
            raise NotImplementedError(
                "SGLang on the platform hybrid_cpu verifies no drafts in layers with "
                "windows; drop --speculative-algorithm."
            )
        if save_kv_cache and k is not None:
            from sglang.srt.mem_cache.memory_pool import KVWriteLoc

            where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        return attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices],
            forward_batch.seq_lens,
            _mask(layer, forward_batch),
            layer.scaling,
        ).flatten(1)

    setattr(forward, _APPLIED, original)
    return forward


def _mask(layer: Any, forward_batch: Any) -> torch.Tensor:
    """``[N, L, L]``, which drafts a draft sees: all, in a block proposed at once.

    Raises:
        NotImplementedError: for a layer of such a block that has a mask as well.
    """
    from sglang.srt.layers.radix_attention import AttentionType

    drafts = forward_batch.spec_info
    if layer.attn_type != AttentionType.ENCODER_ONLY:
        return mask_among_drafts(
            drafts.custom_mask, forward_batch.seq_lens, drafts.draft_token_num
        )
    if drafts.custom_mask is not None:
        raise NotImplementedError("a block of drafts that see each other has no mask")
    size = drafts.draft_token_num
    return torch.ones((forward_batch.seq_lens.numel(), size, size), dtype=torch.bool)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of `L` drafts of each of `N` sequences.

    Args:
        q: ``[N * L, H, D]``.
        keys: ``[tokens, HK, D]``, of the pool.
        values: ``[tokens, HK, DV]``.
        positions: ``[N, ...]``, where each sequence's tokens and then its drafts lie.
        lengths: ``[N]``, tokens before the drafts.
        mask: ``[N, L, M]``, which of the `M` positions behind these a draft sees.
        scale: of the scores.

    Returns:
        ``[N * L, H, DV]``.
    """
    drafts, behind = mask.shape[1:]
    out = q.new_empty((*q.shape[:2], values.shape[2]))
    for row, length in enumerate(lengths.tolist()):
        places = positions[row, : length + behind].long()
        seen = torch.ones((drafts, length + behind), dtype=torch.bool)
        seen[:, length:] = mask[row]
        mine = slice(row * drafts, (row + 1) * drafts)
        out[mine] = scaled_dot_product_attention(
            q[mine].transpose(0, 1)[None],
            keys[places].to(q.dtype).transpose(0, 1)[None],
            values[places].to(q.dtype).transpose(0, 1)[None],
            attn_mask=seen,
            scale=scale,
            enable_gqa=q.shape[1] != keys.shape[1],
        )[0].transpose(0, 1)
    return out


def mask_among_drafts(
    mask: torch.Tensor | None, lengths: torch.Tensor, drafts: int
) -> torch.Tensor:
    """``[N, L, L]`` from either of SGLang's flat forms; chains without a mask.

    Args:
        mask: of each sequence ``[L, length + L]`` or ``[L, L]``.
        lengths: ``[N]``, tokens before the drafts.
        drafts: `L`.

    Raises:
        ValueError: for a mask of another size.
    """
    rows = lengths.numel()
    if mask is None:
        return torch.ones((rows, drafts, drafts), dtype=torch.bool).tril()
    if mask.numel() == rows * drafts * drafts:
        return mask.view(rows, drafts, drafts)
    widths = (lengths + drafts).tolist()
    if mask.numel() != drafts * sum(widths):
        raise ValueError(f"a mask of {mask.numel()} for {rows} rows of {drafts} drafts")
    parts = torch.split(mask, [drafts * width for width in widths])
    return torch.stack(
        [part.view(drafts, -1)[:, -drafts:] for part in parts]
        or [mask.new_empty((0, drafts, drafts))]
    )
