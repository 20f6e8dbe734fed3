# SPDX-License-Identifier: Apache-2.0
"""One token for each sequence."""

from __future__ import annotations

from typing import Any

import torch
from hybrid_kernels import causal_conv1d, gated_delta_rule, kda, ssd
from torch.nn import functional

from .shapes import Head, peer, randn, rotating_slots
from .timing import OURS, Call, Point

_VLLM = "vllm.third_party.flash_linear_attention.ops"
_SGLANG = "sglang.kernels.ops"


def delta(head: Head, batch: int, fused: bool) -> Point:
    """The gated delta rule, with the layer's gates `fused` or given."""
    count, slots = rotating_slots(batch, scattered=fused)
    pool = head.pool(count)
    widths = [head.keys * head.depth] * 2 + [head.values * head.width]
    mixed = randn(batch, sum(widths))
    q, k, v = mixed.split(widths, dim=-1)
    q, k = (x.view(batch, head.keys, head.depth) for x in (q, k))
    v = v.view(batch, head.values, head.width)
    a, b = (randn(batch, head.values) for _ in range(2))
    log_a, shift = (randn(head.values, dtype=torch.float32) for _ in range(2))
    rate, out = -log_a.exp(), torch.empty_like(v)
    g, beta = rate * functional.softplus(a.float() + shift), b.sigmoid()

    def ours(index: int) -> torch.Tensor:
        gates = {"A": rate, "dt_bias": shift} if fused else {}
        decay, write = (a, b) if fused else (g, beta)
        return gated_delta_rule.update(
            q,
            k,
            v,
            decay,
            write,
            pool,
            slots[index],
            **gates,
            use_qk_l2norm=True,
            out=out,
        )

    def packed(function: Any) -> Call | None:
        target = torch.empty(batch, 1, *v.shape[1:], device="cuda", dtype=v.dtype)

        def call(index: int) -> torch.Tensor:
            function(
                mixed,
                a,
                b,
                log_a,
                shift,
                head.depth**-0.5,
                pool,
                target,
                slots[index],
                use_qk_l2norm_in_kernel=True,
            )
            return target

        return call if function else None

    calls: dict[str, Call | None] = {OURS: ours}
    if fused:
        name = "fused_recurrent_gated_delta_rule_packed_decode"
        calls["vllm"] = packed(peer(f"{_VLLM}.fused_recurrent", name))
        module = f"{_SGLANG}.attention.fla.fused_recurrent"
        calls["sglang"] = packed(peer(module, name))
    else:
        fla = peer("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")
        calls["fla (no slots)"] = _fla(fla, (q, k, v, g, beta), pool)
    op = f"gated_delta_rule.update, gates {'fused' if fused else 'given'}"
    return _point(op, head, batch, calls, pool)


def kimi(head: Head, batch: int, fused: bool) -> Point:
    """Kimi delta attention, with the layer's gates `fused` or given."""
    count, slots = rotating_slots(batch, scattered=fused)
    pool = head.pool(count)
    widths = [head.keys * head.depth] * 2 + [head.values * head.width]
    mixed = randn(batch, sum(widths))
    q, k, v = (x.view(batch, head.values, -1) for x in mixed.split(widths, dim=-1))
    a, b = randn(batch, head.values, head.depth), randn(batch, head.values)
    log_a = randn(head.values, dtype=torch.float32)
    shift = randn(head.values, head.depth, dtype=torch.float32)
    rate, out = -log_a.exp(), torch.empty_like(v)
    g, beta = rate[:, None] * functional.softplus(a.float() + shift), b.sigmoid()
    cu = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    rows = [x.contiguous() for x in (q, k, v)]
    vllm = peer(f"{_VLLM}.kda", "fused_recurrent_kda")
    sglang = peer(
        f"{_SGLANG}.attention.fla.fused_recurrent", "fused_recurrent_kda_packed_decode"
    )
    target = torch.empty(batch, 1, *v.shape[1:], device="cuda", dtype=v.dtype)

    def ours(index: int) -> torch.Tensor:
        gates = {"A": rate, "dt_bias": shift} if fused else {}
        decay, write = (a, b) if fused else (g, beta)
        return kda.update(
            q,
            k,
            v,
            decay,
            write,
            pool,
            slots[index],
            **gates,
            use_qk_l2norm=True,
            out=out,
        )

    def theirs(index: int) -> torch.Tensor:
        result: torch.Tensor = vllm(
            *(x[None] for x in (*rows, g, beta)),
            initial_state=pool,
            cu_seqlens=cu,
            ssm_state_indices=slots[index],
            use_qk_l2norm_in_kernel=True,
        )[0]
        return result

    def packed(index: int) -> torch.Tensor:
        sglang(
            mixed,
            a.flatten(1),
            b,
            log_a,
            shift.flatten(),
            head.depth**-0.5,
            pool,
            target,
            slots[index],
            use_qk_l2norm_in_kernel=True,
        )
        return target

    calls: dict[str, Call | None] = {OURS: ours}
    if fused:
        calls["sglang"] = packed if sglang else None
    else:
        calls["vllm"] = theirs if vllm else None
        fla = peer("fla.ops.kda", "fused_recurrent_kda")
        calls["fla (no slots)"] = _fla(fla, (*rows, g, beta), pool)
    op = f"kda.update, gates {'fused' if fused else 'given'}"
    return _point(op, head, batch, calls, pool)


def mamba2(head: Head, batch: int) -> Point:
    """The single step of Mamba-2."""
    count, slots = rotating_slots(batch)
    pool = head.pool(count)
    x, gate, out = (randn(batch, head.values, head.width) for _ in range(3))
    b, c = (randn(batch, head.keys, head.depth) for _ in range(2))
    dt = randn(batch, head.values)
    a = -torch.rand(head.values, device="cuda") - 0.5
    skip, bias = (randn(head.values, dtype=torch.float32) for _ in range(2))
    per_head = (head.values, head.width)
    wide = {
        "dt": dt[..., None].expand(-1, -1, head.width),
        "A": a[:, None, None].expand(*per_head, head.depth),
        "D": skip[:, None].expand(per_head),
        "dt_bias": bias[:, None].expand(per_head),
    }

    def ours(index: int) -> torch.Tensor:
        options = {"skip": skip, "gate": gate, "dt_bias": bias, "out": out}
        return ssd.update(x, dt, a, b, c, pool, slots[index], **options)

    def theirs(module: str, takes_out: bool) -> Call | None:
        function = peer(module, "selective_state_update")
        target = torch.empty_like(x)
        more = {"out": target} if takes_out else {}
        # Some have 32-bit indices, which overflow where a pool passes 2**31 elements.
        wide_slots = slots.long()

        def call(index: int) -> torch.Tensor:
            options = {"z": gate, "dt_softplus": True, **wide, **more}
            result = function(
                pool, x, B=b, C=c, state_batch_indices=wide_slots[index], **options
            )
            return target if takes_out else result

        return call if function else None

    calls: dict[str, Call | None] = {
        OURS: ours,
        "vllm": theirs("vllm.model_executor.layers.mamba.ops.mamba_ssm", True),
        "sglang": theirs(f"{_SGLANG}.mamba.triton_ops.mamba_ssm", True),
        "mamba_ssm": theirs("mamba_ssm.ops.triton.selective_state_update", False),
    }
    return _point("ssd.update", head, batch, calls, pool)


def convolution(channels: int, batch: int) -> Point:
    """The step of the convolution, channels contiguous as engines have them."""
    count, slots = rotating_slots(batch)
    pool = randn(count, 3, channels).transpose(1, 2)
    x, out = randn(batch, channels), randn(batch, channels)
    weight = randn(channels, 4)
    name = "causal_conv1d_update"
    vllm = peer("vllm.model_executor.layers.mamba.ops.causal_conv1d", name)
    sglang = peer(f"{_SGLANG}.mamba.causal_conv1d_triton", name)
    cuda = peer("causal_conv1d", name)

    def ours(index: int) -> torch.Tensor:
        return causal_conv1d.update(
            x, weight, None, pool, slots[index], activation="silu", out=out
        )

    def theirs(function: Any, **more: Any) -> Call | None:
        def call(index: int) -> torch.Tensor:
            result: torch.Tensor = function(
                x, pool, weight, None, "silu", conv_state_indices=slots[index], **more
            )
            return result

        return call if function else None

    calls: dict[str, Call | None] = {
        OURS: ours,
        "vllm": theirs(vllm, out=torch.empty_like(x)),
        "sglang (Triton)": theirs(sglang) if sglang else None,
        "causal-conv1d": theirs(cuda),
    }
    moved = batch * (2.0 * pool[0].nbytes + 2 * x[0].nbytes)
    shape = f"D={channels}"
    return Point("causal_conv1d.update", shape, f"{batch}", calls, pool, moved)


def _fla(
    function: Any, rows: tuple[torch.Tensor, ...], pool: torch.Tensor
) -> Call | None:
    """fla's step: reads packed states and writes new ones."""
    batch = rows[0].shape[0]
    tokens = [x.contiguous()[:, None] for x in rows]

    def call(index: int) -> torch.Tensor:
        first = 1 + index * batch
        result: torch.Tensor = function(
            *tokens[:4],
            beta=tokens[4],
            initial_state=pool[first : first + batch],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            state_v_first=True,
        )[0]
        return result

    return call if function else None


def _point(
    op: str, head: Head, batch: int, calls: dict[str, Call | None], pool: torch.Tensor
) -> Point:
    moved = 2.0 * batch * pool[0].nbytes
    return Point(op, head.model, f"{batch}", calls, pool, moved)
