# SPDX-License-Identifier: Apache-2.0
"""The convolution of verified drafts, in vLLM's layout, on a CPU."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional


def convolve(
    x: torch.Tensor,
    windows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: torch.Tensor,
    accepted: torch.Tensor,
    starts: torch.Tensor,
    *,
    activation: str | None,
) -> torch.Tensor:
    """Convolve rows of one to `1 + k` tokens, and leave each row's window for the next.

    A window holds `W - 1 + k` inputs.  The `W - 1` before this pass's first token begin
    at the number of tokens that the last pass got accepted, less one.  Afterwards those
    before the token behind the pass's first begin at 0, and so on: how many of a row's
    tokens are accepted is known later.

    Args:
        x: ``[T, D]``, the rows' inputs one behind the other.
        windows: ``[S, D, W - 1 + k]``, with any strides.
        weight: ``[D, W]``.
        bias: ``[D]`` or None.
        slots: ``[N]``; rows in slot 0 are padding.
        accepted: ``[N]``, 1 to `1 + k`, of the pass before.
        starts: ``[N + 1]``, ascending: row `i` has the tokens from ``starts[i]`` on.
        activation: "silu", "swish" or None.

    Returns:
        ``[T, D]``, of `x`'s type; 0 for padding.
    """
    inputs = weight.shape[-1] - 1
    taps = weight.float()[:, None]
    offset_by_bias = None if bias is None else bias.float()
    out = torch.zeros_like(x)
    rows = zip(slots.tolist(), accepted.tolist(), _spans(starts), strict=True)
    for slot, count, (start, end) in rows:
        if slot <= 0 or start == end:
            continue
        window = windows[slot]
        before = window[:, count - 1 : count - 1 + inputs]
        line = torch.cat([before.float(), x[start:end].float().T], dim=1)
        result = functional.conv1d(line[None], taps, offset_by_bias, groups=len(taps))
        if activation is not None:
            result = functional.silu(result)
        out[start:end] = result[0].T.to(out.dtype)
        window[:, : line.shape[1] - 1] = line[:, 1:].to(window.dtype)
    return out


def _spans(starts: torch.Tensor) -> list[tuple[int, int]]:
    ends = starts.tolist()
    return list(pairwise(ends))
