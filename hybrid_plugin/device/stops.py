# SPDX-License-Identifier: Apache-2.0
"""Where a request ends among the tokens that a verification accepted."""

from __future__ import annotations

import torch

NO_TOKEN = -1
"""Fills rows of stop tokens: no token has this id."""


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
