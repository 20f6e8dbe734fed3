# SPDX-License-Identifier: Apache-2.0
"""SGLang's kernels of pooled index keys, in PyTorch.

An index key stands for `P` tokens in turn: a mean of theirs, weighted for each channel
by a softmax of their scores and of an offset for each place.  It lies in the page of
its tokens, in eight bits, with a scale.  Tokens that no key stands for yet wait in a
ring of `W` places, a row for each sequence.  SGLang rotates index keys and queries
alike before it rounds them, which changes no product; here they are rounded as they
are.  `D` channels of an index key, `T` packed tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from hybrid_plugin.sglang_cpu.unsupported import refuse

_LARGEST = 448.0
"""Of the type that index keys have in pages."""
_SMALLEST = 1e-4


def pool_and_write(
    pool: Any,
    buf: torch.Tensor,
    chunk_k: torch.Tensor,
    chunk_score: torch.Tensor,
    tail_k: torch.Tensor,
    tail_score: torch.Tensor,
    req_pool_idx: torch.Tensor,
    n_from_tail: torch.Tensor,
    chunk_src_start: torch.Tensor,
    tail_logical_base: torch.Tensor,
    ape: torch.Tensor,
    loc: torch.Tensor,
    write_mask: torch.Tensor | None = None,
    round_scale: bool = False,
) -> None:
    """Make index keys that a prefill completes.

    Args:
        pool: SGLang's `DSATokenToKVPool`.
        buf: ``[pages, bytes]``, written.
        chunk_k: ``[T, D]``, the pass's.
        chunk_score: ``[T, D]``.
        tail_k: ``[rows, W, D]``, the ring.
        tail_score: ``[rows, W, D]``.
        req_pool_idx: ``[keys]``, the ring's row.
        n_from_tail: ``[keys]``, how many of a key's tokens are there.
        chunk_src_start: ``[keys]``, the first of the others in the pass.
        tail_logical_base: ``[keys]``, position of the first token.
        ape: ``[P, D]``, offsets of the scores.
        loc: ``[keys]``, where they go.
        write_mask: refused.
        round_scale: whether scales are powers of two.

    Raises:
        NotImplementedError: for a mask.
    """
    refuse("context parallelism", write_mask=write_mask)
    place = torch.arange(pool.index_kpool)
    waited = place < n_from_tail[:, None]
    row = req_pool_idx.long()[:, None].expand_as(waited)
    ring = (tail_logical_base.long()[:, None] + place) % tail_k.shape[1]
    new = chunk_src_start.long()[:, None] + place - n_from_tail.long()[:, None]
    new = new.clamp(min=0)
    keys = torch.where(waited[..., None], tail_k[row, ring], chunk_k[new])
    scores = torch.where(waited[..., None], tail_score[row, ring], chunk_score[new])
    _write(pool, buf, _pooled(keys, scores, ape), loc, round_scale)


def leave_in_ring(
    pool: Any,
    chunk_k: torch.Tensor,
    chunk_score: torch.Tensor,
    tail_k: torch.Tensor,
    tail_score: torch.Tensor,
    req_pool_idx: torch.Tensor,
    dst_logical_start: torch.Tensor,
    chunk_src_start: torch.Tensor,
    n_write: torch.Tensor,
) -> None:
    """Leave the last tokens of prefills in the ring, one run for each sequence.

    Args:
        pool: not used.
        chunk_k: as for `pool_and_write`, as are `chunk_score` and the ring.
        tail_k: written.
        tail_score: written.
        req_pool_idx: ``[runs]``, the ring's row.
        dst_logical_start: ``[runs]``, position of the first token.
        chunk_src_start: ``[runs]``, its place in the pass.
        n_write: ``[runs]``, tokens.
    """
    runs = zip(
        req_pool_idx.tolist(),
        dst_logical_start.tolist(),
        chunk_src_start.tolist(),
        n_write.tolist(),
        strict=True,
    )
    for row, position, start, count in runs:
        places = torch.arange(position, position + count) % tail_k.shape[1]
        tail_k[row, places] = chunk_k[start : start + count].to(tail_k.dtype)
        scores = chunk_score[start : start + count]
        tail_score[row, places] = scores.to(tail_score.dtype)


def step(
    pool: Any,
    buf: torch.Tensor,
    tail_k: torch.Tensor,
    tail_score: torch.Tensor,
    key: torch.Tensor,
    slot_score: torch.Tensor,
    ape: torch.Tensor,
    block_tables: torch.Tensor,
    req_pool_indices: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    round_scale: bool = False,
) -> None:
    """Put one token of each sequence in the ring, and make the keys it completes.

    Args:
        pool: SGLang's `DSATokenToKVPool`.
        buf: ``[pages, bytes]``, written.
        tail_k: ``[rows, W, D]``, the ring, written.
        tail_score: ``[rows, W, D]``, written.
        key: ``[N, D]``.
        slot_score: ``[N, D]``.
        ape: ``[P, D]``, offsets of the scores.
        block_tables: ``[N, pieces]``, pages in pieces as large as one of index keys.
        req_pool_indices: ``[N]``, the ring's row.
        positions: ``[N]``.
        seq_lens: not used.
        out_cache_loc: ``[N]``, 0 for padding.
        round_scale: whether scales are powers of two.
    """
    real = out_cache_loc[: len(key)] != 0
    row, position = req_pool_indices[: len(key)][real].long(), positions[real].long()
    places = position % tail_k.shape[1]
    tail_k[row, places] = key[real].to(tail_k.dtype)
    tail_score[row, places] = slot_score[real].to(tail_score.dtype)
    size = pool.index_kpool
    ends = position % size == size - 1
    row, number = row[ends], position[ends] // size
    ring = (number[:, None] * size + torch.arange(size)) % tail_k.shape[1]
    found = tail_k[row[:, None], ring], tail_score[row[:, None], ring]
    pages = block_tables[: len(key)][real][ends]
    places = places_of(pool, pages, number[:, None])[:, 0]
    _write(pool, buf, _pooled(*found, ape), places, round_scale)


def read(pool: Any, buf: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Index keys, ``[keys, D]`` in float32.

    Args:
        pool: SGLang's `DSATokenToKVPool`.
        buf: ``[pages, bytes]``.
        places: ``[keys]``.
    """
    keys, scales = _parts(pool, buf)
    page, place = places // pool.index_page_size, places % pool.index_page_size
    return keys[page, place].float() * scales[page, place, None]


def places_of(pool: Any, pieces: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Where index keys of sequences lie.

    Args:
        pool: SGLang's `DSATokenToKVPool`.
        pieces: ``[N, pieces]``, the pages of each sequence in pieces as large as a
            page of index keys: `P` of them are a page.
        numbers: ``[N, keys]``, of its index keys.
    """
    size = pool.index_page_size
    first = numbers // size * pool.index_kpool
    page = pieces.long().gather(1, first) // pool.index_kpool
    return page * size + numbers % size


def ragged_layout(
    full_page_table: torch.Tensor,
    cu_pages_excl: torch.Tensor,
    ragged_pool_pages: torch.Tensor,
    cu_q_len_excl: torch.Tensor,
    ragged_q_len: torch.Tensor,
    pooled_seq_lens_expanded: torch.Tensor,
    index_page_size: int,
    total_pool_pages: int,
    total_q: int,
    kpool: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What kernels of a GPU read; on a CPU nobody does.

    Returns:
        Three empty tensors.
    """
    nothing = full_page_table.new_empty(0, dtype=torch.int32)
    return nothing, nothing, nothing


def _pooled(
    keys: torch.Tensor, scores: torch.Tensor, ape: torch.Tensor
) -> torch.Tensor:
    """``[keys, D]`` of ``[keys, P, D]``."""
    shares = (scores.float() + ape.float()).softmax(1)
    return (shares * keys.float()).sum(1)


def _write(
    pool: Any,
    buf: torch.Tensor,
    keys: torch.Tensor,
    places: torch.Tensor,
    round_scale: bool,
) -> None:
    scale = keys.abs().amax(-1).clamp(min=_SMALLEST) / _LARGEST
    if round_scale:
        scale = scale.log2().ceil().exp2()
    kept, scales = _parts(pool, buf)
    page, place = places // pool.index_page_size, places % pool.index_page_size
    rounded = (keys / scale[:, None]).clamp(-_LARGEST, _LARGEST)
    kept[page, place] = rounded.to(kept.dtype)
    scales[page, place] = scale


def _parts(pool: Any, buf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys of each page ``[pages, keys, D]``, and behind them their scales."""
    count, width = pool.index_page_size, pool.index_head_dim
    keys = buf[:, : count * width].view(torch.float8_e4m3fn)
    scales = buf[:, count * width :].view(torch.float32)
    return keys.view(len(buf), count, width), scales
