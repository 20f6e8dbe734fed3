# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch; the CPU path."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

NO_TOKEN = -1
"""Fills rows of stop tokens: no token has this id."""
ROOM = 8
"""Stop tokens that a row had better have room for: kernels are compiled for it."""


def filled(stop_ids: Collection[int], room: int) -> list[int]:
    """A row of `Ends.stop_ids` with room for so many."""
    return [*stop_ids, *[NO_TOKEN] * (room - len(stop_ids))]


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends requests, in tables with a row for each; all int32 or int64."""

    stop_ids: torch.Tensor
    """``[R, S]``, tokens each of which ends a request; `NO_TOKEN` fills."""
    lengths: torch.Tensor
    """``[R]``, tokens in all that end a request."""
    computed: torch.Tensor
    """``[R]`` or longer, tokens computed before the step.  Its first token was known,
    so that with the first that it gives two more than these are."""
    others: torch.Tensor | None = None
    """``[N, L]`` bool, of a step: which tokens end a request for another reason."""


def until_stop(
    tokens: torch.Tensor,
    stop_ids: torch.Tensor,
    computed: torch.Tensor,
    lengths: torch.Tensor,
    others: torch.Tensor | None = None,
) -> torch.Tensor:
    """How many tokens of each request count: up to its first stop, and with it.

    Args:
        tokens: ``[N, L]``, what a step gave each request, in order.
        stop_ids: ``[N, S]``, tokens each of which ends a request; `NO_TOKEN` fills.
        computed: ``[N]``, tokens computed before the step.  Its first token was known,
            so that with the first of `tokens` two more than these are known.
        lengths: ``[N]``, tokens in all that end a request.
        others: ``[N, L]``, which tokens end a request for another reason.

    Returns:
        ``[N]``, from 1 to `L`, or `L + 1` where nothing ends the request.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    ends = (tokens[:, :, None] == stop_ids[:, None]).any(-1)
    ends |= computed[:, None] + 2 + places >= lengths[:, None]
    if others is not None:
        ends |= others
    return torch.where(ends, places, tokens.shape[1]).amin(1) + 1


def cut(
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    rows: torch.Tensor,
    ends: Ends,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hybrid_kernels.stops.cut`."""
    rows = rows.long()
    tables = ends.stop_ids[rows], ends.computed[rows], ends.lengths[rows]
    most = until_stop(sampled, *tables, ends.others)
    kept = torch.minimum(num_sampled, most.to(num_sampled.dtype))
    return kept, num_rejected + (num_sampled - kept).to(num_rejected.dtype)
