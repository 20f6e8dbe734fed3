# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of drafts lie, and which of them go on: SGLang's small kernels.

`N` sequences have `L` drafts each.  SGLang has these kernels for GPUs in Triton, and
for its own CPU platform in a package that out-of-tree platforms lack.
"""

from __future__ import annotations

from typing import Any

import torch

from hybrid_plugin.sglang_cpu.unsupported import refuse


def positions_of_rows(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """Positions in the KV pool of so many tokens of each row, packed.

    Args:
        req_pool_indices: ``[N]`` rows.
        req_to_token: ``[rows, length]``.
        start_offset: ``[N]``, the first token of each.
        end_offset: ``[N]``, behind the last one.
        batch_size: `N`; not used.
        draft_token_num: tokens of a row at most; not used.
        device: not used.

    Returns:
        int64 ``[total]``.
    """
    cells = _cells(req_pool_indices, start_offset, end_offset)
    return req_to_token[cells].to(torch.int64)


def positions_of_branches(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """Write the positions of what a draft model proposes, behind each sequence.

    Args:
        req_pool_indices: ``[N]`` rows.
        req_to_token: ``[rows, length]``.
        seq_lens: ``[N]``, tokens of each sequence.
        out_cache_loc: ``[N * topk * num_cols]``, written.
        topk: branches of a sequence.
        num_cols: tokens of a branch.
        positions: refused, as is `mrope`: SGLang asks for them on CUDA.
    """
    refuse("positions of branches", positions=positions, mrope=mrope)
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_cols)
    found = req_to_token[req_pool_indices.long()[:, None], columns]
    out_cache_loc.copy_(found.reshape(-1))


def write_rows(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write packed positions into rows; the reverse of `positions_of_rows`."""
    cells = _cells(req_pool_indices, start_offset, end_offset)
    req_to_token[cells] = out_cache_loc.to(req_to_token.dtype)


def first_of_windows(
    num_front: torch.Tensor,
    out_cache_loc: torch.Tensor,
    front_out_cache_loc: torch.Tensor,
) -> None:
    """Pack the first positions of each sequence's window.

    Args:
        num_front: ``[N]``, how many of each.
        out_cache_loc: ``[N * L]``.
        front_out_cache_loc: written from its start.
    """
    windows = out_cache_loc.view(num_front.numel(), -1)
    wanted = torch.arange(windows.shape[1]) < num_front[:, None]
    packed = windows[wanted]
    front_out_cache_loc[: packed.numel()] = packed


def accepted_positions(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
    size: int,
) -> None:
    """Pack the positions of accepted drafts.

    Args:
        accept_index: ``[N, M]`` numbers of drafts in the batch, -1 for none.
        out_cache_loc: ``[N * L]``.
        accept_out_cache_loc: written from its start.
        size: `N * M`; not used.
    """
    accepted = accept_index.reshape(-1)
    packed = out_cache_loc[accepted[accepted >= 0].long()]
    accept_out_cache_loc[: packed.numel()] = packed


def last_tokens(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """Write the last accepted token of each sequence.

    Args:
        accept_tokens: ``[N * accept_stride]``.
        accept_lens: ``[N]``, at least 1.
        bonus_tokens: ``[N]``, written.
        accept_stride: tokens of a row.
        batch_size: `N`.
    """
    rows = accept_tokens.view(batch_size, accept_stride)
    last = rows.gather(1, (accept_lens.long() - 1)[:, None])
    bonus_tokens.copy_(last[:, 0])


def leave_copies_to_torch(self: Any) -> None:
    """Have a KV pool move accepted tokens by indexing, which needs no set-up."""
    self._kv_copy_config = None
    self.use_native_move_kv_cache = True


def _cells(
    rows: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each token between two offsets, row after row."""
    counts = (end - start).long()
    first = counts.cumsum(0) - counts
    steps = torch.arange(int(counts.sum())) - first.repeat_interleave(counts)
    columns = start.long().repeat_interleave(counts) + steps
    return rows.long().repeat_interleave(counts), columns
