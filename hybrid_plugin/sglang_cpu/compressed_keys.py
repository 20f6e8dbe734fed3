# SPDX-License-Identifier: Apache-2.0
"""Sparse attention by compressed index keys on a CPU (Qwen4-Exp).

SGLang has a PyTorch form of most of it.  An index key stands for `P` tokens in turn: a
mean of theirs, normalised and rotated.  `D` channels of an index key.
"""

from __future__ import annotations

import torch

_ROWS = 64
"""Queries at once, for the memory that their keys take."""


def packed(
    compressed: torch.Tensor,
    token_slot_table: torch.Tensor,
    cu_blocks: torch.Tensor,
    total_blocks: int,
    max_blocks: int,
    compress_ratio: int,
) -> torch.Tensor:
    """All index keys of sequences, one sequence after another.

    Args:
        compressed: ``[keys of the pool, 1, D]``.
        token_slot_table: ``[sequences, tokens]``, positions in the pool.
        cu_blocks: ``[sequences + 1]``, where each sequence's keys start.
        total_blocks: keys of all.
        max_blocks: not used.
        compress_ratio: `P`.

    Returns:
        ``[total_blocks, 1, D]``.
    """
    numbers = torch.arange(total_blocks)
    row = torch.searchsorted(cu_blocks[1:].long(), numbers, right=True)
    first = (numbers - cu_blocks.long()[row]) * compress_ratio
    return compressed[token_slot_table[row, first].long() // compress_ratio]


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    token_slots: torch.Tensor,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Attention of each query to tokens of its own; SGLang's form takes them in turn.

    Args:
        q: ``[T, H, D]``.
        k_cache: ``[positions, KV heads, D]``.
        v_cache: the same.
        token_slots: ``[T, width]`` positions in the pool, -1 for none.
        softmax_scale: of the scores; by default `D ** -0.5`.

    Returns:
        ``[T, H, D]``.
    """
    scale = softmax_scale or q.shape[-1] ** -0.5
    heads = q.shape[1] // k_cache.shape[1]
    out = torch.empty_like(q)
    for start in range(0, len(q), _ROWS):
        mine = slice(start, start + _ROWS)
        slots = token_slots[mine].long()
        there = (slots >= 0)[:, None, None]
        places = slots.clamp(min=0)
        queries = q[mine].float()
        queries = queries.view(len(queries), -1, heads, queries.shape[-1])
        keys, values = k_cache[places].float(), v_cache[places].float()
        scores = torch.einsum("tghd,tkgd->tghk", queries, keys) * scale
        shares = scores.masked_fill(~there, -torch.inf).softmax(-1)
        read = torch.einsum("tghk,tkgd->tghd", shares.nan_to_num(), values)
        out[mine] = read.flatten(1, 2).to(q.dtype)
    return out


def choose_in_torch() -> None:
    """Symptom: on a CPU, the first prefill of a Qwen4-Exp fails, "forward_native".

    Cause: what chooses the tokens has no form of that name, though all of its steps
    have one.
    Fix: name the one that all platforms share.
    Delete when: SGLang does.
    """
    from sglang.srt.layers.attention.qsa.qsa_indexer import QSAIndexer

    QSAIndexer.register_oot_forward(QSAIndexer, QSAIndexer._forward_impl, "native")


def choose_as_few_as_asked() -> None:
    """Symptom: a model whose queries read fewer than 512 index keys does not start.

    Cause: a kernel of SGLang's chooses 512 or 2048, and its configurations are checked
    for that whatever the device.
    Fix: any number will do, where no such kernel runs.
    Delete when: SGLang asks the platform.
    """
    from sglang.srt.layers.attention.qsa import config
    from sglang.srt.layers.attention.qsa.qsa_indexer import QSAIndexer

    config._COMPRESSED_BLOCK_TOPK = range(1, 1 << 31)
    QSAIndexer._validate_config = staticmethod(config.parse_qsa_profile)


def keep_waiting_keys_in_float32() -> None:
    """Symptom: in float32 an index key is another one if its tokens came one by one.

    Cause: tokens that no index key stands for yet wait in bfloat16, which is what GPUs
    compute in; a prefill takes them as they are.
    Fix: they wait in float32.
    Delete when: the type is the model's.
    """
    from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool

    QSATokenToKVPool.index_state_dtype = torch.float32
