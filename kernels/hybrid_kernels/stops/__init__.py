# SPDX-License-Identifier: Apache-2.0
"""Where requests end among the tokens that a verification accepted.

An engine that plans its next step before it knows what this one gave has to find that
on the device: `cut` does in one launch, allocates its two results and never waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hybrid_kernels._common.checks import check_flags, check_index, on_gpu, require
from hybrid_kernels.stops.reference import NO_TOKEN, until_stop

if TYPE_CHECKING:
    import torch

__all__ = ["NO_TOKEN", "Cut", "cut", "until_stop"]


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
    stop_ids: torch.Tensor,
    lengths: torch.Tensor,
    computed: torch.Tensor,
    others: torch.Tensor | None = None,
) -> Cut:
    """Count as rejected what was accepted behind a request's end.

    Args:
        sampled: ``[N, L]``, accepted drafts and one token more, in order.
        num_sampled: ``[N]``, how many of them count.
        num_rejected: ``[N]``, of the drafts.
        rows: ``[N]``, of the requests in the tables that follow; all indices and counts
            are int32 or int64.
        stop_ids: ``[R, S]``, tokens each of which ends a request; `NO_TOKEN` fills.
        lengths: ``[R]``, tokens in all that end a request.
        computed: ``[R]`` or longer, tokens computed before the step.  Its first token
            was known, so that with the first of `sampled` two more than these are.
        others: ``[N, L]`` bool, which tokens end a request for another reason.

    Raises:
        ValueError: if shapes or types do not fit.
    """
    require(sampled.ndim == 2, "sampled has not 2 dimensions")
    require(stop_ids.ndim == 2, "stop_ids has not 2 dimensions")
    (count, width), (table, most) = sampled.shape, stop_ids.shape
    check_index("sampled", sampled, (count, width))
    for name, tensor in (
        ("num_sampled", num_sampled),
        ("num_rejected", num_rejected),
        ("rows", rows),
    ):
        check_index(name, tensor, (count,))
    check_index("stop_ids", stop_ids, (table, most))
    check_index("lengths", lengths, (table,))
    check_index("computed", computed, tuple(computed.shape[:1]))
    if others is not None:
        check_flags("others", others, (count, width))
    given = sampled, num_sampled, num_rejected, rows, stop_ids, lengths, computed
    if on_gpu(sampled):
        from hybrid_kernels.stops import triton

        return Cut(*triton.cut(*given, others))
    from hybrid_kernels.stops import reference

    return Cut(*reference.cut(*given, others))
