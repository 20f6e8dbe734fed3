# SPDX-License-Identifier: Apache-2.0
"""SGLang's calls of Kimi delta attention, beside the plain recurrence."""

from __future__ import annotations

import pytest
import torch

from hybrid_plugin.sglang_cpu import delta_rule, kimi_delta

HEADS, DEPTH, WIDTH, SLOTS = 3, 8, 8, 6
LENGTHS = (70, 5)
SLOT_OF = (4, 1)
BOUND = -5.0


class Layer:
    """Random projections of a packed batch, and a pool of states."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        total = sum(LENGTHS)
        self.q, self.k = torch.randn(2, total, HEADS, DEPTH)
        self.v = torch.randn(total, HEADS, WIDTH)
        self.a = torch.randn(total, HEADS, DEPTH)
        self.b = torch.randn(total, HEADS)
        self.rate = torch.empty(1, 1, HEADS, 1).uniform_(-1, 1)
        self.bias = torch.randn(HEADS * DEPTH)
        self.pool = torch.randn(SLOTS, HEADS, WIDTH, DEPTH)
        self.bounds = torch.tensor([0, 70, 75], dtype=torch.int32)
        self.slots = torch.tensor(SLOT_OF, dtype=torch.int32)

    def expected(self, bound: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and pool, token by token."""
        pool, out = self.pool.clone(), torch.empty_like(self.v)
        x = self.a + self.bias.view(HEADS, DEPTH)
        rate = self.rate.view(HEADS, 1).exp()
        if bound is None:
            decay = -rate * torch.log1p(x.exp())
        else:
            decay = bound / (1 + (-rate * x).exp())
        unit = [t / (t.norm(dim=-1, keepdim=True) + 1e-6) for t in (self.q, self.k)]
        for row, slot in enumerate(SLOT_OF):
            for t in range(*self.bounds[row : row + 2].tolist()):
                state = pool[slot] * decay[t].exp()[:, None]
                q, k = unit[0][t], unit[1][t]
                error = self.v[t] - torch.einsum("hvk,hk->hv", state, k)
                beta = self.b[t].sigmoid()[:, None, None]
                pool[slot] = state + beta * error[..., None] * k[:, None]
                out[t] = torch.einsum("hvk,hk->hv", pool[slot], q) * DEPTH**-0.5
        return out, pool


@pytest.mark.parametrize("bound", [None, BOUND], ids=["softplus", "lower bound"])
def test_a_prefill_is_the_recurrence(bound: float | None) -> None:
    layer = Layer()
    expected, pool = layer.expected(bound)
    found = kimi_delta.prefill(
        *(x[None] for x in (layer.q, layer.k, layer.v, layer.a, layer.b)),
        initial_state=layer.pool,
        initial_state_indices=layer.slots,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=layer.bounds,
        A_log=layer.rate,
        dt_bias=layer.bias,
        lower_bound=bound,
        output_intermediate_states=True,
        beta_is_raw=True,
    )
    out, chunks = found
    torch.testing.assert_close(out[0], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layer.pool, pool, atol=1e-4, rtol=1e-4)
    assert chunks.shape == (1, 3, HEADS, WIDTH, DEPTH)


@pytest.mark.parametrize("bound", [None, BOUND], ids=["softplus", "lower bound"])
def test_a_step_goes_on_where_a_prefill_ended(bound: float | None) -> None:
    """Both of SGLang's calls for it: queries, keys and values together or apart."""
    together, apart = Layer(), Layer()
    mixed = torch.cat([x[:1].flatten(1) for x in (together.q, together.k, together.v)])
    mixed = torch.cat(
        [x[:1].flatten(1) for x in (together.q, together.k, together.v)], 1
    )
    out = together.v.new_empty(1, 1, HEADS, WIDTH)
    slot = torch.tensor([SLOT_OF[0]], dtype=torch.int32)
    kimi_delta.step(
        mixed,
        together.a[:1].flatten(1),
        together.b[:1],
        together.rate.view(-1),
        together.bias,
        DEPTH**-0.5,
        together.pool,
        out,
        slot,
        use_qk_l2norm_in_kernel=True,
        lower_bound=bound,
    )
    alone = delta_rule.verify(
        apart.rate,
        apart.a[:1].flatten(1),
        apart.bias,
        1.0,
        20.0,
        *(x[None, :1] for x in (apart.q, apart.k, apart.v, apart.b)),
        apart.pool,
        slot,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.tensor([0, 1]),
        is_kda=True,
        lower_bound=bound,
    )
    expected, _ = Layer().expected(bound)
    torch.testing.assert_close(out[0, 0], expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(alone[0, 0], expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(together.pool, apart.pool)


def test_tracked_states_are_refused() -> None:
    layer = Layer()
    with pytest.raises(NotImplementedError, match="tracked states"):
        kimi_delta.prefill(
            *(x[None] for x in (layer.q, layer.k, layer.v, layer.a, layer.b)),
            track_state=layer.pool,
        )
