# SPDX-License-Identifier: Apache-2.0
"""A gated delta net whose passes are FlashInfer's and ours in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hybrid_kernels import gated_delta_rule

from tests.kernels.common import cu_seqlens, relative_error

HEADS, VALUE_HEADS, WIDTH = 16, 32, 128
BOUND = 1.5e-2
"""Of either library in bfloat16; a state that is laid out otherwise is off by 1."""
LENGTHS = (330, 1000)
Pass = Callable[[Sequence[Any], Any, Any], torch.Tensor]


@pytest.fixture
def flashinfer() -> Pass:
    """A pass by FlashInfer, as engines call it."""
    module = pytest.importorskip("flashinfer.gdn_prefill")

    def run(inputs: Sequence[Any], bounds: Any, pool: Any) -> torch.Tensor:
        q, k, v, g, beta = inputs
        out, final = module.chunk_gated_delta_rule(
            q=_normal(q),
            k=_normal(k),
            v=v,
            g=torch.exp(g),
            beta=beta,
            initial_state=pool.contiguous(),
            output_final_state=True,
            cu_seqlens=bounds.long(),
            backend="flashinfer",
        )
        pool.copy_(final)
        return torch.as_tensor(out)

    return run


def _normal(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def ours(inputs: Sequence[Any], bounds: Any, pool: Any) -> torch.Tensor:
    """A pass by our kernels."""
    slots = torch.arange(len(pool), device="cuda", dtype=torch.int32)
    return gated_delta_rule.prefill(
        *inputs,
        bounds.int(),
        pool,
        slots,
        has_initial=torch.ones(len(pool), dtype=torch.bool, device="cuda"),
        use_qk_l2norm=True,
    )


def made(tokens: int) -> list[torch.Tensor]:
    """Queries, keys, values, log decays and write strengths."""
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    return [
        torch.randn((tokens, HEADS, WIDTH), **half),
        torch.randn((tokens, HEADS, WIDTH), **half),
        torch.randn((tokens, VALUE_HEADS, WIDTH), **half),
        -torch.rand((tokens, VALUE_HEADS), device="cuda") * 0.1,
        torch.rand((tokens, VALUE_HEADS), device="cuda"),
    ]


@pytest.mark.parametrize("first_is_ours", [True, False])
def test_each_goes_on_from_the_others_states(
    flashinfer: Pass, first_is_ours: bool
) -> None:
    inputs = [made(length) for length in LENGTHS]
    packed = [torch.cat(parts) for parts in zip(*inputs, strict=True)]
    bounds = cu_seqlens(LENGTHS).cuda()
    whole = torch.randn((2, VALUE_HEADS, WIDTH, WIDTH), device="cuda")
    pool = whole.clone()
    expected = ours(packed, bounds, whole)

    passes = (ours, flashinfer) if first_is_ours else (flashinfer, ours)
    cut = (150, 777)
    outs: list[list[torch.Tensor]] = [[], []]
    for half, run in enumerate(passes):
        parts = [
            [x[:at] if half == 0 else x[at:] for x in one]
            for one, at in zip(inputs, cut, strict=True)
        ]
        lengths = [len(one[0]) for one in parts]
        joined = [torch.cat(x).contiguous() for x in zip(*parts, strict=True)]
        out = run(joined, cu_seqlens(lengths).cuda(), pool)
        for sequence, piece in enumerate(out.split(lengths)):
            outs[sequence].append(piece)
    got = torch.cat([piece for pieces in outs for piece in pieces])
    assert relative_error(got, expected) < BOUND
    assert relative_error(pool, whole) < BOUND
