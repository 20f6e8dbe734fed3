# SPDX-License-Identifier: Apache-2.0
"""Token positions of a batch, from the pages that the core gave its sequences.

Counterparts of SGLang's `alloc_for_extend` and `alloc_for_decode`: they fill
`req_to_token` and the requests' KV records in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hybrid_plugin.device.arena import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from hybrid_plugin.sglang.prefix_cache import HybridPrefixCache


def extend(
    cache: HybridPrefixCache, batch: ScheduleBatch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Place a prefill batch.

    Returns:
        int64 positions of the batch's new tokens, one after another; and each
        request's row in `req_to_token`, int64, on the device and on the host.
    """
    device = torch.device(batch.device)
    for req in batch.reqs:
        if cache.has_slots and not req.kv.holds_mamba:
            req.kv.mamba_pool_idx = cache.slot_ids[cache.sequence(req).slot]
    fresh = [not req.kv.holds_kv for req in batch.reqs]
    rows = batch.req_to_token_pool.alloc(batch.reqs)
    if rows is None:
        raise RuntimeError(
            f"SGLang admitted {len(batch.reqs)} requests with "
            f"{batch.req_to_token_pool.available_size()} rows free; set a smaller "
            "--max-running-requests."
        )
    ends = batch.seq_lens_cpu.tolist()
    written, added, cells, mapped = [], [], [], []
    width = batch.req_to_token_pool.req_to_token.shape[1]
    for req, row, is_fresh, start, end in zip(
        batch.reqs, rows, fresh, batch.prefix_lens, ends, strict=True
    ):
        # A new row lacks the hit too, whose pages other sequences share.
        begin = 0 if is_fresh else start
        positions = _positions(cache, req, begin, end)
        written.append(positions)
        added.append(positions[start - begin :])
        cells.append(row * width + np.arange(begin, end))
        mapped.append((cache.sequence(req), begin // cache.page_size))
        req.kv.kv_allocated_len = end
        req.kv.kv_committed_len = end
    table = batch.req_to_token_pool.req_to_token.view(-1)
    table[_upload(np.concatenate(cells), device)] = _upload(
        np.concatenate(written), device
    ).to(table.dtype)
    if cache.window_map is not None:
        cache.window_map.write(mapped)
    rows_cpu = torch.tensor(rows, dtype=torch.int64)
    return _upload(np.concatenate(added), device), to_device(rows_cpu, device), rows_cpu


def decode(cache: HybridPrefixCache, batch: ScheduleBatch) -> torch.Tensor:
    """Place one more token of each request; returns int64 positions `[requests]`."""
    if len(batch.reqs) != len(batch.seq_lens_cpu):
        raise RuntimeError("hybrid-plugin serves no beam search yet.")
    pool, lengths = batch.req_to_token_pool, batch.seq_lens
    # Within a page, the position behind the last one.
    positions = pool.req_to_token[batch.req_pool_indices, lengths - 1].to(torch.int64)
    positions = positions + 1
    host = batch.seq_lens_cpu.numpy()
    crossing = np.nonzero(host % cache.page_size == 0)[0]
    if len(crossing):
        begun = [_begin_page(cache, batch.reqs[i], int(host[i])) for i in crossing]
        device = torch.device(batch.device)
        positions[_upload(crossing, device)] = _upload(np.asarray(begun), device)
        if cache.window_map is not None:
            cache.window_map.write(
                (cache.sequence(batch.reqs[i]), int(host[i]) // cache.page_size)
                for i in crossing
            )
    pool.write((batch.req_pool_indices, lengths), positions.to(torch.int32))
    for req in batch.reqs:
        req.kv.kv_allocated_len += 1
        req.kv.kv_committed_len += 1
    return positions


def verify(
    cache: HybridPrefixCache,
    rows: Any,
    reqs: Sequence[Req],
    ends: Sequence[int],
) -> None:
    """Place what the next steps of requests may verify.

    Args:
        cache: of the requests.
        rows: SGLang's `ReqToTokenPool`.
        reqs: that decode.
        ends: of each request, the tokens to have positions for, in whole pages.

    Raises:
        RuntimeError: if no page is left, though SGLang was told so; or if the worker
            verified drafts and did not say so.
    """
    width = rows.req_to_token.shape[1]
    cells, placed = [], []
    for req, end in zip(reqs, ends, strict=True):
        if req.decode_batch_idx > 1 and not cache.cache.is_verifying(cache.name(req)):
            raise RuntimeError(
                "hybrid-plugin does not see what this speculative worker verifies; "
                "drop --speculative-algorithm."
            )
        start = req.kv.kv_allocated_len
        if end <= start:
            continue
        if not cache.grow(req, end):
            raise _no_page_left(cache)
        cells.append(req.kv.req_pool_idx * width + np.arange(start, end))
        placed.append(_positions(cache, req, start, end))
        req.kv.kv_allocated_len = end
    if cells:
        table = rows.req_to_token.view(-1)
        where = _upload(np.concatenate(cells), table.device)
        table[where] = _upload(np.concatenate(placed), table.device).to(table.dtype)


def _no_page_left(cache: HybridPrefixCache) -> RuntimeError:
    return RuntimeError(
        "SGLang decodes beyond the pages that it was told are left: "
        f"{cache.available_and_evictable_str()}"
    )


def _begin_page(cache: HybridPrefixCache, req: Req, length: int) -> int:
    """The first position of the page behind `length` tokens.

    Pages that have left the sequence's windows are freed, once a page and not once a
    token.  A step in flight may still read them: whoever gets them writes behind it.
    """
    cache.trim(req, length)
    if not cache.grow(req, length + 1):
        raise _no_page_left(cache)
    pages: Sequence[int] = cache.sequence(req).pages
    return pages[length // cache.page_size] * cache.page_size


def _positions(
    cache: HybridPrefixCache, req: Req, start: int, end: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Positions of the tokens from `start` to `end` of a live request."""
    size = cache.page_size
    pages = cache.sequence(req).pages[start // size : -(-end // size)]
    whole = np.asarray(pages, dtype=np.int64)[:, None] * size + np.arange(size)
    return whole.reshape(-1)[start % size : start % size + end - start]


def _upload(
    values: np.ndarray[tuple[int], np.dtype[np.int64]], device: torch.device
) -> torch.Tensor:
    return to_device(torch.from_numpy(values), device)
