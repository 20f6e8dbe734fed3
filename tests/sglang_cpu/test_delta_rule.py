# SPDX-License-Identifier: Apache-2.0
"""SGLang's gated delta net calls: prefill, decode and the states between chunks."""

from __future__ import annotations

import pytest
import torch

from hybrid_plugin.sglang_cpu import delta_rule

HEADS, VALUE_HEADS, DEPTH, WIDTH, SLOTS = 2, 4, 8, 6, 7
LENGTHS = (130, 0, 5, 64)
SLOT_OF = (3, 5, 1, 6)


class Layer:
    """Random projections of a packed batch, and a pool of states."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        total = sum(LENGTHS)
        self.q = torch.randn(total, HEADS, DEPTH, dtype=dtype)
        self.k = torch.randn(total, HEADS, DEPTH, dtype=dtype)
        self.v = torch.randn(total, VALUE_HEADS, WIDTH, dtype=dtype)
        self.a = torch.randn(total, VALUE_HEADS, dtype=dtype)
        self.b = torch.randn(total, VALUE_HEADS, dtype=dtype)
        self.rate = torch.empty(VALUE_HEADS).uniform_(-3, 0)
        self.bias = torch.randn(VALUE_HEADS)
        self.pool = torch.randn(SLOTS, VALUE_HEADS, WIDTH, DEPTH)
        self.bounds = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0).int()
        self.slots = torch.tensor(SLOT_OF, dtype=torch.int32)

    def prefill(self, inplace: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and chunk states of the whole batch."""
        g, beta = delta_rule.gates(self.rate, self.a, self.b, self.bias)
        out, nothing, states = delta_rule.prefill(
            self.q[None],
            self.k[None],
            self.v[None],
            g,
            beta,
            initial_state=self.pool,
            initial_state_indices=self.slots,
            cu_seqlens=self.bounds,
            use_qk_l2norm_in_kernel=True,
            inplace_update=inplace,
        )
        assert nothing is None
        return out[0], states[0]

    def step(self, token: int, slot: int) -> torch.Tensor:
        """Output of one token, decoded."""
        row = slice(token, token + 1)
        mixed = torch.cat([x[row].flatten(1) for x in (self.q, self.k, self.v)], dim=1)
        out = self.v.new_empty(1, 1, VALUE_HEADS, WIDTH)
        delta_rule.update(
            mixed,
            self.a[row],
            self.b[row],
            self.rate,
            self.bias,
            DEPTH**-0.5,
            self.pool,
            out,
            torch.tensor([slot], dtype=torch.int32),
            use_qk_l2norm_in_kernel=True,
        )
        return out[0, 0]


def test_prefill_equals_decoding_token_by_token() -> None:
    whole, stepped = Layer(), Layer()
    out, states = whole.prefill()
    expected, met = [], []
    for sequence, slot in enumerate(SLOT_OF):
        for position in range(LENGTHS[sequence]):
            if position % 64 == 0:
                met.append(stepped.pool[slot].clone())
            token = int(stepped.bounds[sequence]) + position
            expected.append(stepped.step(token, slot))
    torch.testing.assert_close(out, torch.stack(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, torch.stack(met), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.pool, stepped.pool, rtol=1e-4, atol=1e-5)


def test_gates_are_the_layer_s() -> None:
    layer = Layer()
    g, beta = delta_rule.gates(layer.rate, layer.a, layer.b, layer.bias)
    time = torch.log1p(torch.exp(layer.a + layer.bias))
    torch.testing.assert_close(g[0], -layer.rate.exp() * time)
    torch.testing.assert_close(beta[0], torch.sigmoid(layer.b))


def test_a_prefill_can_leave_the_pool_alone() -> None:
    layer = Layer()
    before = layer.pool.clone()
    layer.prefill(inplace=False)
    assert torch.equal(layer.pool, before)


def test_a_negative_slot_starts_from_zeros_and_keeps_nothing() -> None:
    layer, zeroed = Layer(), Layer()
    zeroed.pool[SLOT_OF[0]] = 0
    layer.slots[0] = -1
    before = layer.pool[SLOT_OF[0]].clone()
    torch.testing.assert_close(layer.prefill()[0][:130], zeroed.prefill()[0][:130])
    assert torch.equal(layer.pool[SLOT_OF[0]], before)


def test_slots_in_bfloat16() -> None:
    layer, exact = Layer(torch.bfloat16), Layer(torch.bfloat16)
    layer.pool = layer.pool.bfloat16()
    exact.pool = layer.pool.float()
    out, states = layer.prefill()
    expected, expected_states = exact.prefill()
    assert out.dtype is torch.bfloat16 and states.dtype is torch.float32
    assert torch.equal(out, expected)
    assert torch.equal(states, expected_states)
    assert torch.equal(layer.pool, exact.pool.bfloat16())


def test_what_it_does_not_compute_is_refused() -> None:
    layer = Layer()
    x = layer.q[None]
    with pytest.raises(NotImplementedError, match="head_first"):
        delta_rule.prefill(x, x, x, x, x, head_first=True)
    with pytest.raises(ValueError, match="cu_seqlens"):
        delta_rule.prefill(x, x, x, x, x, initial_state=layer.pool)
    with pytest.raises(NotImplementedError, match="beta"):
        delta_rule.gates(layer.rate, layer.a, layer.b, layer.bias, beta=2.0)
