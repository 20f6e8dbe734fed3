# SPDX-License-Identifier: Apache-2.0
"""The gated norm behind a layer, on gates within what a projection made."""

from __future__ import annotations

import torch
from hybrid_kernels import gated_norm

from .shapes import Head, peer, randn
from .timing import OURS, ROTATE, Call, Point

TOKENS = (1, 4, 32, 128, 512, 2048, 8192)
_EPS = 1e-6


def gated(head: Head, tokens: int) -> Point:
    """In place, as behind a gated delta net; the peer copies the gates first."""
    heads, width = head.values, head.width
    columns = 2 * head.keys * head.depth + heads * width
    made = randn(ROTATE, tokens, columns + heads * width)
    gates = made[..., columns:].view(ROTATE, tokens, heads, width)
    x, weight = randn(ROTATE, tokens, heads, width), randn(width)
    theirs = peer(
        "vllm.third_party.flash_linear_attention.ops.layernorm_guard", "layer_norm_fwd"
    )

    def ours(index: int) -> torch.Tensor:
        return gated_norm.rms_norm(x[index], gates[index], weight, _EPS, out=x[index])

    def copied(index: int) -> torch.Tensor:
        out = x[index].view(-1, width)
        theirs(
            out,
            weight,
            None,
            _EPS,
            z=gates[index].reshape(-1, width),
            out=out,
            group_size=width,
            norm_before_gate=True,
            is_rms_norm=True,
            activation="silu",
        )
        return x[index]

    calls: dict[str, Call | None] = {OURS: ours, "vllm": copied if theirs else None}
    moved = 3.0 * x[0].nbytes
    return Point("gated_norm.rms_norm", head.model, f"{tokens}", calls, x, moved)
