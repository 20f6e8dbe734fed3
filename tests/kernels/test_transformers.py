# SPDX-License-Identifier: Apache-2.0
"""References against the modules that `transformers` has for the same layers."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hybrid_kernels import (
    causal_conv1d,
    gated_delta_rule,
    kda,
    lightning_attention,
    rg_lru,
    selective_scan,
    ssd,
)
from torch.nn import functional

from . import layers
from .common import assert_near, cu_seqlens

ZERO = torch.tensor([0])


def model(name: str) -> ModuleType:
    module: ModuleType = pytest.importorskip(
        f"transformers.models.{name}.modeling_{name}"
    )
    return module


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_gated_delta_rule(form: str) -> None:
    function = getattr(model("qwen3_next"), f"torch_{form}_gated_delta_rule")
    inputs = layers.delta(2, 4, 64, 32, fused=False).make(127)
    inputs["q"] *= 3
    pool = torch.randn(1, 4, 32, 64)
    # Up to 5.19 its functions want a key head for every value head.
    q, k = (inputs[name].repeat_interleave(2, 1) for name in "qk")
    expected, state = function(
        q[None],
        k[None],
        inputs["v"][None],
        g=inputs["g"][None],
        beta=inputs["beta"][None],
        initial_state=pool.mT.clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    tables = {"cu_seqlens": cu_seqlens([127]), "pool": pool, "slots": ZERO}
    out = gated_delta_rule.prefill(**inputs, **tables, use_qk_l2norm=True)
    assert_near("out", out, expected[0], 1e-5)
    assert_near("state", pool[0], state[0].mT, 1e-5)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_kimi_delta_attention(form: str) -> None:
    function = getattr(model("kimi_linear"), f"{form}_kimi_delta_attention")
    inputs = layers.kimi(2, 2, 32, 20, fused=False).make(127)
    pool = torch.randn(1, 2, 20, 32)
    expected, state = function(
        *(inputs[name][None] for name in ("q", "k", "v", "g", "beta")),
        initial_state=pool.mT.clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    tables = {"cu_seqlens": cu_seqlens([127]), "pool": pool, "slots": ZERO}
    out = kda.prefill(**inputs, **tables, use_qk_l2norm=True)
    assert_near("out", out, expected[0], 1e-5)
    assert_near("state", pool[0], state[0].mT, 1e-5)


def test_mamba2_chunk_scan() -> None:
    function = model("mamba2").mamba2_chunk_scan
    inputs = layers.mamba2(2, 4, 64, 32).make(127)
    del inputs["gate"]
    pool = torch.randn(1, 4, 32, 64)
    expected, state = function(
        inputs["x"][None],
        inputs["dt"][None],
        inputs["A"],
        inputs["B"][None],
        inputs["C"][None],
        chunk_size=32,
        D=inputs["skip"],
        dt_bias=inputs["dt_bias"],
        initial_states=pool.clone(),
        dt_softplus=True,
        return_final_states=True,
    )
    out = ssd.prefill(**inputs, cu_seqlens=cu_seqlens([127]), pool=pool, slots=ZERO)
    assert_near("out", out, expected[0], 1e-5)
    assert_near("state", pool[0], state[0], 1e-5)


def test_mamba2_state_update() -> None:
    function = model("mamba2").mamba2_selective_state_update
    inputs = layers.mamba2(2, 4, 64, 32).make(3)
    pool = torch.randn(3, 4, 32, 64)
    theirs = pool.clone()
    wide = {name: inputs[name][:, None].expand(4, 32) for name in ("skip", "dt_bias")}
    expected = function(
        theirs,
        inputs["x"],
        inputs["dt"][..., None].expand(3, 4, 32),
        inputs["A"][:, None, None].expand(4, 32, 64),
        inputs["B"],
        inputs["C"],
        D=wide["skip"],
        dt_bias=wide["dt_bias"],
        dt_softplus=True,
        z=inputs["gate"],
    )
    out = ssd.update(**inputs, pool=pool, slots=torch.arange(3))
    assert_near("out", out, expected, 1e-5)
    assert_near("state", pool, theirs, 1e-5)


def test_mamba_selective_scan() -> None:
    function = model("mamba").mamba_selective_scan
    layer = layers.mamba1(12, 4)
    inputs = layer.make(40)
    turned = {n: x.T[None] if n in layer.rows() else x for n, x in inputs.items()}
    expected, state = function(
        *(turned[name] for name in ("x", "dt", "A", "B", "C", "skip")),
        z=turned["gate"],
        delta_bias=inputs["dt_bias"],
        delta_softplus=True,
        return_last_state=True,
    )
    pool = torch.zeros(1, 12, 4)
    tables = {"cu_seqlens": cu_seqlens([40]), "pool": pool, "slots": ZERO}
    out = selective_scan.prefill(**inputs, **tables)
    assert_near("out", out, expected[0].T, 1e-5)
    assert_near("state", pool, state, 1e-5)


def test_recurrent_gemma() -> None:
    gemma = model("recurrent_gemma")
    config = gemma.RecurrentGemmaConfig(lru_width=32, num_attention_heads=2)
    layer = gemma.RecurrentGemmaRglru(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(1, 20, 32)
    with torch.no_grad():
        expected = layer(x, torch.arange(20)[None])
        heads = x.view(20, 2, 16).transpose(0, 1)
        gates = [
            torch.baddbmm(bias[:, None], heads, weight).transpose(0, 1).reshape(20, 32)
            for bias, weight in (
                (layer.input_gate_bias, layer.input_gate_weight),
                (layer.recurrent_gate_bias, layer.recurrent_gate_weight),
            )
        ]
        rate = -8 * functional.softplus(layer.recurrent_param)
    pool = torch.randn(1, 32)
    flags = torch.tensor([False])
    tables = (cu_seqlens([20]), pool, ZERO)
    out = rg_lru.prefill(x[0], *gates, rate, *tables, has_initial=flags)
    assert_near("out", out, expected[0], 1e-5)
    assert_near("state", pool[0], expected[0, -1], 1e-5)


def test_minimax_lightning_attention() -> None:
    minimax = model("minimax")
    config = minimax.MiniMaxConfig(
        hidden_size=48,
        num_attention_heads=4,
        head_dim=16,
        num_hidden_layers=2,
        block_size=32,
        layer_types=["linear_attention", "full_attention"],
    )
    layer = minimax.MiniMaxLightningAttention(config, 0)
    hidden = torch.randn(1, 75, 48)
    with torch.no_grad():
        mixed = layer.act_fn(layer.qkv_proj(hidden))
        q, k, v = mixed.view(75, 4, 48).split(16, dim=-1)
        # What comes behind the attention takes one head's output as another's.
        layer.norm = torch.nn.Identity()
        expected = layer(hidden, position_embeddings=None, attention_mask=None)[0]
        pool = torch.zeros(1, 4, 16, 16)
        tables = {"cu_seqlens": cu_seqlens([75]), "pool": pool, "slots": ZERO}
        decay = -layer.slope_rate.flatten()
        out = lightning_attention.prefill(q, k, v, decay, **tables).view(1, 75, 64)
        out = layer.out_proj(torch.sigmoid(layer.output_gate(hidden)) * out)
    assert_near("out", out, expected, 1e-5)


def test_causal_convolution() -> None:
    qwen = model("qwen3_next")
    x, weight, bias = torch.randn(9, 64), torch.randn(64, 4), torch.randn(64)
    pool = torch.randn(3, 64, 3)
    theirs = pool.clone()
    options = {"activation": "silu"}
    tokens = x.view(3, 3, 64).transpose(1, 2)
    expected = qwen.causal_conv1d_update(tokens, theirs, weight, bias, **options)
    tables = (cu_seqlens([3, 3, 3]), pool, torch.arange(3))
    out = causal_conv1d.prefill(x, weight, bias, *tables, **options)
    assert_near("out", out, expected.transpose(1, 2).reshape(9, 64), 1e-6)
    assert torch.equal(pool, theirs)
    expected = qwen.causal_conv1d_update(tokens[..., :1], theirs, weight, bias)
    slots = torch.arange(3)
    out = causal_conv1d.update(tokens[..., 0], weight, bias, pool, slots)
    assert_near("out", out, expected[..., 0], 1e-6)
    assert torch.equal(pool, theirs)
