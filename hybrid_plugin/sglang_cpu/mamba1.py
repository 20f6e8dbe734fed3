# SPDX-License-Identifier: Apache-2.0
"""SGLang's Mamba-1 decode on `hybrid_kernels.selective_scan`.

SGLang has the kernel of Mamba-2 run it, with a head for each channel.  Its prefill is
PyTorch's already.  `I` channels, `D` state dimensions, `N` sequences, `S` slots.
"""

from __future__ import annotations

import torch
from hybrid_kernels import selective_scan


def has_full_decay(A: torch.Tensor) -> bool:
    """Whether each state dimension of a head decays by a number of its own.

    Args:
        A: ``[H, P, D]``, of which Mamba-2 has one number per head.
    """
    return A.stride()[1:] != (0, 0)


def update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    slots: torch.Tensor,
    *,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Run one new token per sequence and advance its slot in place.

    Args:
        state: ``[S, I, 1, D]``, updated.
        x: ``[N, I, 1]``.
        dt: ``[N, I, 1]``, before softplus.
        A: ``[I, 1, D]``, negative.
        B: ``[N, 1, D]``.
        C: ``[N, 1, D]``.
        slots: ``[N]``; negative for padding rows.
        D: ``[I, 1]`` or None.
        z: ``[N, I, 1]`` or None.
        dt_bias: ``[I, 1]`` or None.
        out: ``[N, I, 1]``, written.

    Raises:
        ValueError: if shapes do not fit.
    """
    selective_scan.update(
        x[..., 0],
        dt[..., 0],
        A[:, 0],
        B[:, 0],
        C[:, 0],
        state[:, :, 0],
        slots,
        skip=None if D is None else D[:, 0],
        gate=None if z is None else z[..., 0],
        dt_bias=None if dt_bias is None else dt_bias[:, 0],
        out=out[..., 0],
    )
