# SPDX-License-Identifier: Apache-2.0
"""Prompts: one or several equally long sequences, from states in slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hybrid_kernels import causal_conv1d, gated_delta_rule, kda, ssd
from torch.nn import functional

from .shapes import Head, peer, randn, rotating_slots
from .timing import OURS, Call, Point

_VLLM = "vllm.third_party.flash_linear_attention.ops"
_SGLANG = "sglang.kernels.ops"
_SSD_CHUNK = 256
_CONV_BLOCK = 8


class Batch:
    """`sequences` of `tokens` each, with slots in order."""

    def __init__(self, sequences: int, tokens: int) -> None:
        """Lay them out on the GPU."""
        self.sequences, self.tokens = sequences, tokens
        self.total = sequences * tokens
        self.size = f"{sequences} x {tokens}"
        self.slot_count, self.slots = rotating_slots(sequences, scattered=False)
        self.long = torch.arange(sequences + 1, device="cuda") * tokens
        self.cu = self.long.int()

    def packed(self, pool: torch.Tensor, index: int) -> torch.Tensor:
        """The states of one turn."""
        first = 1 + index * self.sequences
        return pool[first : first + self.sequences]


def delta(head: Head, sequences: int, tokens: int) -> Point:
    """The gated delta rule."""
    batch = Batch(sequences, tokens)
    q, k = (randn(batch.total, head.keys, head.depth) for _ in range(2))
    v, out = (randn(batch.total, head.values, head.width) for _ in range(2))
    g = -functional.softplus(randn(batch.total, head.values, dtype=torch.float32))
    beta = torch.rand(batch.total, head.values, device="cuda")
    rows = (q, k, v, g, beta)
    pool = head.pool(batch.slot_count, 0.0)

    def ours(index: int) -> torch.Tensor:
        return gated_delta_rule.prefill(
            *rows, batch.cu, pool, batch.slots[index], use_qk_l2norm=True, out=out
        )

    name = "chunk_gated_delta_rule"
    calls = {
        OURS: ours,
        "fla": _packed(peer("fla.ops.gated_delta_rule", name), rows, pool, batch),
        "vllm": _packed(peer(f"{_VLLM}.chunk", name), rows, pool, batch, fla=False),
        "sglang": _slots(
            peer(f"{_SGLANG}.attention.fla.chunk", name), rows, pool, batch
        ),
        "flashinfer": _flashinfer(
            peer("flashinfer.gdn_prefill", name), rows, pool, batch
        ),
    }
    return Point("gated_delta_rule.prefill", head.model, batch.size, calls, pool)


def kimi(head: Head, sequences: int, tokens: int) -> Point:
    """Kimi delta attention."""
    batch = Batch(sequences, tokens)
    q, k, v = (randn(batch.total, head.values, head.depth) for _ in range(3))
    g = -functional.softplus(randn(*k.shape, dtype=torch.float32))
    beta = torch.rand(batch.total, head.values, device="cuda")
    out, rows = torch.empty_like(v), (q, k, v, g, beta)
    pool = head.pool(batch.slot_count, 0.0)

    def ours(index: int) -> torch.Tensor:
        return kda.prefill(
            *rows, batch.cu, pool, batch.slots[index], use_qk_l2norm=True, out=out
        )

    calls = {
        OURS: ours,
        "fla": _packed(peer("fla.ops.kda", "chunk_kda"), rows, pool, batch),
        "vllm": _packed(
            peer(f"{_VLLM}.kda", "chunk_kda"), rows, pool, batch, fla=False
        ),
        "sglang": _slots(
            peer(f"{_SGLANG}.attention.fla.kda", "chunk_kda"), rows, pool, batch
        ),
    }
    return Point("kda.prefill", head.model, batch.size, calls, pool)


def mamba2(head: Head, sequences: int, tokens: int) -> Point:
    """The chunk scan of Mamba-2."""
    batch = Batch(sequences, tokens)
    x, out = (randn(batch.total, head.values, head.width) for _ in range(2))
    b, c = (randn(batch.total, head.keys, head.depth) for _ in range(2))
    dt = randn(batch.total, head.values)
    a = -torch.rand(head.values, device="cuda") - 0.5
    skip, bias = (randn(head.values, dtype=torch.float32) for _ in range(2))
    pool = head.pool(batch.slot_count, 0.0)
    common = {"D": skip, "dt_bias": bias, "dt_softplus": True}
    seq_idx = torch.arange(sequences, device="cuda", dtype=torch.int32)
    seq_idx = seq_idx.repeat_interleave(tokens)[None]

    def ours(index: int) -> torch.Tensor:
        options = {"skip": skip, "dt_bias": bias, "out": out}
        return ssd.prefill(
            x, dt, a, b, c, batch.cu, pool, batch.slots[index], **options
        )

    vllm = peer(
        "vllm.model_executor.layers.mamba.ops.ssd_combined",
        "mamba_chunk_scan_combined_varlen",
    )
    chunks, target = _chunks(batch), torch.empty_like(x)

    def theirs(index: int) -> torch.Tensor:
        vllm(
            *(x, dt, a, b, c, _SSD_CHUNK, batch.cu),
            **chunks,
            **common,
            out=target,
            initial_states=batch.packed(pool, index),
            state_dtype=torch.float32,
            final_states_out=pool,
            final_state_indices=batch.slots[index],
        )
        return target

    def combined(function: Any, **more: Any) -> Call | None:
        def call(index: int) -> torch.Tensor:
            with torch.no_grad():
                result = function(
                    *(x[None], dt[None], a, b[None], c[None]),
                    chunk_size=_SSD_CHUNK,
                    seq_idx=seq_idx,
                    cu_seqlens=batch.cu,
                    return_varlen_states=True,
                    **common,
                    **more,
                )
            return target if "out" in more else result[0]

        return call if function else None

    name = "mamba_chunk_scan_combined"
    sglang = peer(f"{_SGLANG}.mamba.triton_ops.ssd_combined", name)
    mamba = peer("mamba_ssm.ops.triton.ssd_combined", name)
    calls = {
        OURS: ours,
        "vllm": theirs if vllm else None,
        "sglang (no initial states)": combined(sglang, out=target[None]),
        "mamba_ssm (no initial states)": combined(mamba, return_final_states=True),
    }
    return Point("ssd.prefill", head.model, batch.size, calls, pool)


def convolution(channels: int, sequences: int, tokens: int) -> Point:
    """The convolution in front, channels contiguous."""
    batch = Batch(sequences, tokens)
    x, out = randn(batch.total, channels), randn(batch.total, channels)
    weight = randn(channels, 4)
    pool = randn(batch.slot_count, 3, channels).transpose(1, 2)
    flags = torch.ones(sequences, dtype=torch.bool, device="cuda")
    lengths = [tokens] * sequences
    plan, states = _conv_plan(lengths), torch.empty_like(pool[:1])
    fla = peer("fla.modules.causal_conv1d", "causal_conv1d")
    name = "causal_conv1d_fn"
    vllm = peer("vllm.model_executor.layers.mamba.ops.causal_conv1d", name)
    sglang = peer(f"{_SGLANG}.mamba.causal_conv1d_triton", name)
    cuda = peer("causal_conv1d", name) if sequences == 1 else None

    def ours(index: int) -> torch.Tensor:
        tables = (batch.cu, pool, batch.slots[index])
        return causal_conv1d.prefill(
            x, weight, None, *tables, has_initial=flags, activation="silu", out=out
        )

    def no_state(index: int) -> torch.Tensor:
        with torch.no_grad():
            result = fla(
                x[None], weight, None, activation="silu", cu_seqlens=batch.long
            )
        first: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return first

    def slots(function: Any, *extra: Any, **more: Any) -> Call | None:
        def call(index: int) -> torch.Tensor:
            result: torch.Tensor = function(
                *(x.T, weight, None, pool, batch.cu, *extra),
                cache_indices=batch.slots[index],
                has_initial_state=flags,
                activation="silu",
                **more,
            )
            return result.T

        return call if function else None

    def packed(index: int) -> torch.Tensor:
        with torch.no_grad():
            result = cuda(
                x.T[None],
                weight,
                initial_states=batch.packed(pool, index),
                return_final_states=True,
                final_states_out=states,
                activation="silu",
            )
        first: torch.Tensor = result[0]
        return first[0].T

    calls = {
        OURS: ours,
        "vllm": slots(vllm, metadata=plan),
        "sglang (Triton)": slots(sglang, lengths),
        "causal-conv1d (no slots)": packed if cuda else None,
        "fla (no state)": no_state if fla else None,
    }
    shape = f"D={channels}"
    moved = 2.0 * x.nbytes
    return Point("causal_conv1d.prefill", shape, batch.size, calls, pool, moved)


def _packed(
    function: Any,
    rows: tuple[torch.Tensor, ...],
    pool: torch.Tensor,
    batch: Batch,
    fla: bool = True,
) -> Call | None:
    """A call that reads packed states and returns new ones."""
    more = {"state_v_first": True} if fla else {}

    def call(index: int) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = function(
                *(x[None] for x in rows),
                initial_state=batch.packed(pool, index),
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=batch.long if fla else batch.cu,
                **more,
            )[0]
        return result

    return call if function else None


def _slots(
    function: Any, rows: tuple[torch.Tensor, ...], pool: torch.Tensor, batch: Batch
) -> Call | None:
    """A call that reads and writes states in slots."""

    def call(index: int) -> torch.Tensor:
        with torch.no_grad():
            result = function(
                *(x[None] for x in rows),
                initial_state=pool,
                initial_state_indices=batch.slots[index],
                cu_seqlens=batch.cu,
                use_qk_l2norm_in_kernel=True,
            )
        first: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return first

    return call if function else None


def _flashinfer(
    function: Any, rows: tuple[torch.Tensor, ...], pool: torch.Tensor, batch: Batch
) -> Call | None:
    """FlashInfer's Hopper kernel, the engines' default where it is installed.

    It takes factors where the others take their logarithms; engines make them in a
    kernel of their own, which is not timed.
    """
    q, k, v, g, beta = rows
    factors, out = g.exp(), torch.empty_like(v)

    def call(index: int) -> torch.Tensor:
        with torch.no_grad():
            function(
                *(q, k, v, factors, beta),
                initial_state=pool,
                output_state=pool,
                output_final_state=True,
                state_indices=batch.slots[index],
                cu_seqlens=batch.cu,
                use_qk_l2norm_in_kernel=True,
                output=out,
                max_seqlen=batch.tokens,
                backend="flashinfer",
            )
        return out

    return call if function else None


def _chunks(batch: Batch) -> dict[str, torch.Tensor]:
    """Where vLLM's chunks lie; made once per step there, so not timed."""
    each = range(0, batch.tokens, _SSD_CHUNK)
    starts = [n * batch.tokens + t for n in range(batch.sequences) for t in each]
    owners = [n for n in range(batch.sequences) for _ in each]
    last = [(n + 1) * len(each) - 1 for n in range(batch.sequences)]
    lists = {
        "cu_chunk_seqlens": [*starts, batch.total],
        "last_chunk_indices": last,
        "seq_idx": owners,
    }
    return {n: torch.tensor(x, device="cuda").int() for n, x in lists.items()}


def _conv_plan(lengths: list[int]) -> SimpleNamespace:
    """vLLM's plan of its convolution; made once per step there, so not timed."""
    blocks = [-(-length // _CONV_BLOCK) for length in lengths]
    owners = [n for n, count in enumerate(blocks) for _ in range(count)]
    offsets = [block for count in blocks for block in range(count)]
    owner, offset = (torch.tensor(x, device="cuda").int() for x in (owners, offsets))
    plan = {
        "tot": len(owners),
        "mlist": owner,
        "mlist_len": len(owners),
        "offsetlist": offset,
        "batch_ptr": owner,
        "token_chunk_offset_ptr": offset,
    }
    return SimpleNamespace(
        nums_dict={_CONV_BLOCK: plan}, batch_ptr=owner, token_chunk_offset_ptr=offset
    )
