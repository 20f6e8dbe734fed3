# SPDX-License-Identifier: Apache-2.0
"""Where requests end among the tokens that a verification accepted.

An engine that plans its next step before it knows what this one gave has to find that
on the device: `cut` does in one launch, allocates its two results and never waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hybrid_kernels._common.checks import check_flags, check_index, on_gpu, require
from hybrid_kernels.stops import reference
from hybrid_kernels.stops.reference import NO_TOKEN, ROOM, Ends, filled

if TYPE_CHECKING:
    import torch

__all__ = ["NO_TOKEN", "ROOM", "Cut", "Ends", "cut", "filled"]


class Cut(NamedTuple):
    """What counts of a step's tokens."""

    sampled: torch.Tensor
    """``[N]``: tokens of each request, up to its end."""
    rejected: torch.Tensor
    """``[N]``: drafts, those behind the end among them."""


def cut(
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    rows: torch.Tensor,
    ends: Ends,
) -> Cut:
    """Count as rejected what was accepted behind a request's end.

    Args:
        sampled: ``[N, L]``, accepted drafts and one token more, in order; this and all
            that follows is int32 or int64.
        num_sampled: ``[N]``, how many of them count.
        num_rejected: ``[N]``, of the drafts.
        rows: ``[N]``, of the requests in the tables.
        ends: the tables.

    Raises:
        ValueError: if shapes or types do not fit.
    """
    require(sampled.ndim == 2, "sampled has not 2 dimensions")
    count, width = sampled.shape
    check_index("sampled", sampled, (count, width))
    for name, tensor in (
        ("num_sampled", num_sampled),
        ("num_rejected", num_rejected),
        ("rows", rows),
    ):
        check_index(name, tensor, (count,))
    _check(ends, count, width)
    if on_gpu(sampled):
        from hybrid_kernels.stops import triton

        return Cut(*triton.cut(sampled, num_sampled, num_rejected, rows, ends))
    return Cut(*reference.cut(sampled, num_sampled, num_rejected, rows, ends))


def _check(ends: Ends, count: int, width: int) -> None:
    require(ends.stop_ids.ndim == 2, "stop_ids has not 2 dimensions")
    table, most = ends.stop_ids.shape
    check_index("stop_ids", ends.stop_ids, (table, most))
    check_index("lengths", ends.lengths, (table,))
    check_index("computed", ends.computed, tuple(ends.computed.shape[:1]))
    if ends.others is not None:
        check_flags("others", ends.others, (count, width))
