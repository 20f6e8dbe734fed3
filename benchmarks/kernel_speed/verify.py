# SPDX-License-Identifier: Apache-2.0
"""A few draft tokens for each sequence, and what it takes to accept some of them.

Ours keeps a record of the drafts and folds the accepted ones into the main states of
all layers afterwards. The engines' kernels, and ours with slots, write a state for
each draft; vLLM then goes on from the accepted one, SGLang copies it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hybrid_kernels import causal_conv1d, gated_delta_rule, kda, replay, ssd

from .shapes import DEVICE, Head, peer, randn
from .timing import OURS, ROTATE, Call, Point

_SGLANG = "sglang.kernels.ops"
SLOTS = f"{OURS} (slots)"
DRAFTS = 4
"""Tokens of a row: the last known one and three drafts."""
TREE = (-1, 0, 0, 0, 1, 1, 2, 4)
"""Parents of a small tree."""
LAYERS = 8
"""That are committed together."""
ACCEPTED = 3
"""Tokens of each row that are."""


@dataclass(frozen=True)
class _Rows:
    """Main slots, and a slot or scratch row for each draft, of `ROTATE` turns."""

    pool: torch.Tensor
    """`[S, *state]`; main states first, then those of drafts; slot 0 is unused."""
    batch: int
    drafts: int
    parents: torch.Tensor | None

    @staticmethod
    def make(head: Head, batch: int, tree: bool) -> _Rows:
        drafts = len(TREE) if tree else DRAFTS
        pool = head.pool(1 + ROTATE * batch * (1 + drafts))
        parents = torch.tensor(TREE, device=DEVICE, dtype=torch.int32)
        return _Rows(
            pool, batch, drafts, parents.repeat(batch, 1).contiguous() if tree else None
        )

    @property
    def slots(self) -> torch.Tensor:
        """`[ROTATE, N]`, in random order."""
        order = 1 + torch.randperm(ROTATE * self.batch)
        return order.view(ROTATE, self.batch).int().to(DEVICE)

    def table(self, slots: torch.Tensor) -> torch.Tensor:
        """`[ROTATE, N, L]`; a chain's first draft goes to the main slot."""
        shape = ROTATE, self.batch, self.drafts
        order = torch.randperm(shape[0] * shape[1] * shape[2]).view(shape)
        table = (1 + ROTATE * self.batch + order).int().to(DEVICE)
        if self.parents is None:
            table[..., 0] = slots
        return table

    @property
    def scratch(self) -> torch.Tensor:
        """`[ROTATE * N, L, *state]`, as SGLang keeps drafts' states."""
        first = 1 + ROTATE * self.batch
        return self.pool[first:].unflatten(0, (-1, self.drafts))

    @property
    def scratch_rows(self) -> torch.Tensor:
        """`[ROTATE, N]`."""
        rows = torch.arange(ROTATE * self.batch, device=DEVICE, dtype=torch.int32)
        return rows.view(ROTATE, self.batch)

    @property
    def bounds(self) -> torch.Tensor:
        """`[N + 1]`: rows of equal length, packed."""
        rows = torch.arange(self.batch + 1, device=DEVICE, dtype=torch.int32)
        return rows * self.drafts

    def laid_out(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[N, L, ...]`` as engines hand them over: packed, but for trees."""
        return tokens.flatten(0, 1) if self.parents is None else tokens

    def form(self, out: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """What says so to our kernels, and where they write."""
        if self.parents is not None:
            return {"parents": self.parents, "out": out}
        return {"cu_seqlens": self.bounds, "out": out.flatten(0, 1)}

    def point(self, op: str, model: str, calls: dict[str, Call | None]) -> Point:
        """Any implementation must read the main states."""
        kind = "tree" if self.parents is not None else "chain"
        op = f"{op}, {kind} of {self.drafts}"
        moved = 1.0 * self.batch * self.pool[0].nbytes
        return Point(op, model, f"{self.batch}", calls, self.pool, moved)


def _record(layer: Head, rows: _Rows, wide: bool = False) -> torch.Tensor:
    size = replay.record_size(rows.pool, layer.keys, wide_decay=wide)
    return torch.empty(ROTATE, rows.batch, rows.drafts, size, device=DEVICE)


def delta_rule(head: Head, batch: int, wide: bool = False, tree: bool = False) -> Point:
    """The delta rule with the layer's gates fused; KDA if decays are `wide`."""
    rows = _Rows.make(head, batch, tree)
    slots = rows.slots
    table, scratch_rows, bounds = rows.table(slots), rows.scratch_rows, rows.bounds
    lead = batch, rows.drafts
    q, k = (randn(*lead, head.keys, head.depth) for _ in range(2))
    v = randn(*lead, head.values, head.width)
    decays = (head.values, head.depth) if wide else (head.values,)
    a, b = randn(*lead, *decays), randn(*lead, head.values)
    log_a = randn(head.values, dtype=torch.float32)
    shift = randn(*decays, dtype=torch.float32)
    gates = {"A": -log_a.exp(), "dt_bias": shift, "use_qk_l2norm": True}
    record, out = _record(head, rows, wide), torch.empty_like(v)
    verify = kda.verify if wide else gated_delta_rule.verify
    packed = [x.flatten(0, 1)[None] for x in (q, k, v)]
    flat_a, flat_b = a.flatten(0, 1).flatten(1), b.flatten(0, 1)
    name = "fused_sigmoid_gating_delta_rule_update"
    vllm = peer(
        "vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating", name
    )
    sglang = peer(f"{_SGLANG}.attention.linear.fused_sigmoid_gating_recurrent", name)
    module = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
    vllm_kda = peer(module, "fused_recurrent_kda") if wide else None
    first = torch.ones(batch, device=DEVICE, dtype=torch.int32)

    def ours(index: int, **kept: torch.Tensor) -> torch.Tensor:
        kept = kept or {"record": record[index]}
        options = {**gates, **kept, **rows.form(out)}
        tokens = [rows.laid_out(one) for one in (q, k, v, a, b)]
        return verify(*tokens, rows.pool, slots[index], **options)

    def of_vllm(index: int) -> torch.Tensor:
        result: torch.Tensor = vllm(
            log_a,
            flat_a,
            flat_b,
            shift.flatten(),
            *packed,
            initial_state=rows.pool,
            cu_seqlens=bounds,
            ssm_state_indices=table[index],
            num_accepted_tokens=first,
            use_qk_l2norm_in_kernel=True,
        )[0]
        return result

    def kda_of_vllm(index: int) -> torch.Tensor:
        result: torch.Tensor = vllm_kda(
            *packed,
            a.flatten(0, 1)[None],
            flat_b[None],
            log_a,
            shift.flatten(),
            None,
            rows.pool,
            bounds,
            table[index],
            num_accepted_tokens=first,
        )[0]
        return result

    def of_sglang(index: int) -> torch.Tensor:
        result: torch.Tensor = sglang(
            log_a,
            flat_a,
            shift.flatten(),
            1.0,
            20.0,
            *packed,
            flat_b,
            rows.pool,
            slots[index],
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=bounds,
            is_kda=wide,
            disable_state_update=True,
            intermediate_states_buffer=rows.scratch,
            intermediate_state_indices=scratch_rows[index],
            cache_steps=rows.drafts,
            retrieve_parent_token=rows.parents,
        )
        return result

    calls: dict[str, Call | None] = {
        OURS: ours,
        SLOTS: lambda index: ours(index, draft_slots=table[index]),
        "sglang": of_sglang if sglang else None,
    }
    if not tree:  # vLLM has none
        found, call = (vllm_kda, kda_of_vllm) if wide else (vllm, of_vllm)
        calls["vllm"] = call if found else None
    op = "kda.verify" if wide else "gated_delta_rule.verify"
    return rows.point(op, head.model, calls)


def mamba2(head: Head, batch: int, tree: bool = False) -> Point:
    """Mamba-2, as `decode.mamba2`."""
    rows = _Rows.make(head, batch, tree)
    slots = rows.slots
    table, scratch_rows = rows.table(slots), rows.scratch_rows
    lead = batch, rows.drafts
    x, gate, out = (randn(*lead, head.values, head.width) for _ in range(3))
    b, c = (randn(*lead, head.keys, head.depth) for _ in range(2))
    dt = randn(*lead, head.values)
    a = -torch.rand(head.values, device=DEVICE) - 0.5
    skip, bias = (randn(head.values, dtype=torch.float32) for _ in range(2))
    record = _record(head, rows)
    per_head = (head.values, head.width)
    wide = {
        "A": a[:, None, None].expand(*per_head, head.depth),
        "D": skip[:, None].expand(per_head),
        "dt_bias": bias[:, None].expand(per_head),
        "dt_softplus": True,
    }
    wide_dt = dt[..., None].expand(*lead, *per_head)
    name, target = "selective_state_update", torch.empty_like(x)
    vllm = peer("vllm.model_executor.layers.mamba.ops.mamba_ssm", name)
    sglang = peer(f"{_SGLANG}.mamba.triton_ops.mamba_ssm", name)
    first = torch.ones(batch, device=DEVICE, dtype=torch.int32)
    bounds, wide_table, wide_slots = rows.bounds, table.long(), slots.long()

    def ours(index: int, **kept: torch.Tensor) -> torch.Tensor:
        kept = kept or {"record": record[index]}
        options = {**kept, **rows.form(out), "skip": skip, "dt_bias": bias}
        x_, dt_, b_, c_, gate_ = (rows.laid_out(one) for one in (x, dt, b, c, gate))
        options["gate"] = gate_
        return ssd.verify(x_, dt_, a, b_, c_, rows.pool, slots[index], **options)

    def of_vllm(index: int) -> torch.Tensor:
        vllm(
            rows.pool,
            x.flatten(0, 1),
            wide_dt.flatten(0, 1),
            B=b.flatten(0, 1),
            C=c.flatten(0, 1),
            z=gate.flatten(0, 1),
            state_batch_indices=wide_table[index],
            out=target.flatten(0, 1),
            num_accepted_tokens=first,
            cu_seqlens=bounds,
            **wide,
        )
        return target

    def of_sglang(index: int) -> torch.Tensor:
        sglang(
            rows.pool,
            x,
            wide_dt,
            B=b,
            C=c,
            z=gate,
            state_batch_indices=wide_slots[index],
            out=target,
            disable_state_update=True,
            intermediate_states_buffer=rows.scratch,
            cache_steps=rows.drafts,
            retrieve_parent_token=rows.parents,
            intermediate_state_indices=scratch_rows[index],
            **wide,
        )
        return target

    calls: dict[str, Call | None] = {
        OURS: ours,
        SLOTS: lambda index: ours(index, draft_slots=table[index]),
        "sglang": of_sglang if sglang else None,
    }
    if not tree:
        calls["vllm"] = of_vllm if vllm else None
    return rows.point("ssd.verify", head.model, calls)


def convolution(channels: int, batch: int) -> Point:
    """Chains through the convolution."""
    x, out = (randn(batch, DRAFTS, channels) for _ in range(2))
    weight, count = randn(channels, 4), ROTATE * batch
    pool = randn(1 + count * DRAFTS, 3, channels).transpose(1, 2)
    slots = (1 + torch.randperm(count)).view(ROTATE, batch).int().to(DEVICE)
    table = 1 + torch.randperm(count * DRAFTS).view(ROTATE, batch, DRAFTS)
    table = table.int().to(DEVICE)
    record = randn(ROTATE, batch, DRAFTS, channels)
    # vLLM keeps the inputs of drafts behind the window, SGLang a window for each.
    longer = randn(1 + count, 2 + DRAFTS, channels).transpose(1, 2)
    windows = randn(count, DRAFTS, channels, 3)
    rows = torch.arange(count, device=DEVICE, dtype=torch.int32).view(ROTATE, batch)
    bounds = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32) * DRAFTS
    first = torch.ones(batch, device=DEVICE, dtype=torch.int32)
    target = torch.empty_like(x).flatten(0, 1)
    name = "causal_conv1d_update"
    vllm = peer("vllm.model_executor.layers.mamba.ops.causal_conv1d", name)
    sglang = peer(f"{_SGLANG}.mamba.causal_conv1d_triton", name)

    def ours(index: int, **kept: torch.Tensor) -> torch.Tensor:
        kept = kept or {"record": record[index]}
        return causal_conv1d.verify(
            x, weight, None, pool, slots[index], activation="silu", out=out, **kept
        )

    def of_vllm(index: int) -> torch.Tensor:
        result: torch.Tensor = vllm(
            x.flatten(0, 1),
            longer,
            weight,
            None,
            "silu",
            conv_state_indices=slots[index],
            num_accepted_tokens=first,
            query_start_loc=bounds,
            max_query_len=DRAFTS,
            out=target,
        )
        return result

    def of_sglang(index: int) -> torch.Tensor:
        result: torch.Tensor = sglang(
            x.transpose(1, 2),
            pool,
            weight,
            None,
            "silu",
            conv_state_indices=slots[index],
            intermediate_conv_window=windows,
            intermediate_state_indices=rows[index],
        )
        return result.transpose(1, 2)

    calls: dict[str, Call | None] = {
        OURS: ours,
        SLOTS: lambda index: ours(index, draft_slots=table[index]),
        "vllm": of_vllm if vllm else None,
        "sglang (Triton)": of_sglang if sglang else None,
    }
    moved = batch * (1.0 * pool[0].nbytes + 2 * x[0].nbytes)
    op, shape = f"causal_conv1d.verify, chain of {DRAFTS}", f"D={channels}"
    return Point(op, shape, f"{batch}", calls, pool, moved)


def commit(head: Head, channels: int, batch: int, wide: bool = False) -> Point:
    """Accept drafts in several layers, states and windows."""
    count = 1 + ROTATE * batch
    slots = (1 + torch.randperm(count - 1)).view(ROTATE, batch).int().to(DEVICE)
    states = head.pool(LAYERS * count).unflatten(0, (LAYERS, count))
    windows = randn(LAYERS, count, channels, 3)
    size = replay.record_size(states[0], head.keys, wide_decay=wide)
    lead = LAYERS, batch, DRAFTS
    record = randn(*lead, size, dtype=torch.float32) * head.depth**-0.5
    inputs = randn(*lead, channels)
    layers = replay.Layers(
        [
            replay.States(states[n], record[n], head.keys, wide_decay=wide)
            for n in range(LAYERS)
        ],
        [replay.Windows(windows[n], inputs[n]) for n in range(LAYERS)],
    )
    accepted = torch.full((batch,), ACCEPTED, device=DEVICE, dtype=torch.int32)
    module = f"{_SGLANG}.mamba.mamba_state_scatter_triton"
    scatter = peer(module, "fused_mamba_state_scatter_with_mask")
    scatter_windows = peer(module, "fused_conv_window_scatter_with_mask")

    def ours(index: int) -> torch.Tensor:
        replay.commit(layers, slots[index], accepted)
        return states[:, 0]

    calls: dict[str, Call | None] = {OURS: ours, "sglang (copies)": None}
    if scatter and scatter_windows:
        scratch = torch.empty(*lead, *states.shape[2:], device=DEVICE)
        kept = randn(*lead, channels, 3)
        last = accepted - 1

        def of_sglang(index: int) -> torch.Tensor:
            scatter(states, scratch, slots[index], last)
            scatter_windows(windows, kept, slots[index], last)
            return scratch[:, :0]

        calls["sglang (copies)"] = of_sglang
    moved = 2.0 * LAYERS * batch * (states[0, 0].nbytes + windows[0, 0].nbytes)
    op = f"replay.commit, {ACCEPTED} of {DRAFTS}, {LAYERS} layers"
    return Point(op, head.model, f"{batch}", calls, states, moved)
